"""Rank 0 has one batch more than rank 1, and waits for it at the end of the epoch (torchtitan#1618)."""

from common import Decoder, counting, run, sharded, start, train
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset


def main(faulty: bool) -> None:
    rank, world = start(seconds=8)
    data = TensorDataset(counting(41))
    if faulty:
        loader = DataLoader(Subset(data, range(rank, len(data), world)), batch_size=4)
    else:
        sampler = DistributedSampler(data, shuffle=False, drop_last=True)
        loader = DataLoader(data, batch_size=4, sampler=sampler)
    train(sharded(Decoder()), batches=(tokens for (tokens,) in loader))


run(main)
