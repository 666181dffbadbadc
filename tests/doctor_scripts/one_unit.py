"""The whole model is one unit, so every rank gathers all parameters at once.

See fairscale#1050.
"""

from common import BF16, Decoder, counting, run, sharded, start, train
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main(faulty: bool) -> None:
    start()
    model = Decoder(blocks=4)
    sharded(model, blocks=() if faulty else model.blocks, mp_policy=BF16)
    samples = TensorDataset(counting(64))
    loader = DataLoader(samples, batch_size=4, sampler=DistributedSampler(samples, drop_last=True))
    train(model, batches=(tokens for (tokens,) in loader))


run(main)
