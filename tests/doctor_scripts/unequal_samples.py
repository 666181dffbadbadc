"""Rank 0 has one batch more than rank 1, and waits for it at the end of the epoch (torchtitan#1618)."""

import torch
from common import Decoder, counting, cpu_mesh, next_token_loss, run, say, start
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset


def main(faulty: bool) -> None:
    rank, world = start(seconds=8)
    mesh = cpu_mesh()
    model = Decoder()
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    data = TensorDataset(counting(41))
    if faulty:
        loader = DataLoader(Subset(data, range(rank, len(data), world)), batch_size=4)
    else:
        sampler = DistributedSampler(data, shuffle=False, drop_last=True)
        loader = DataLoader(data, batch_size=4, sampler=sampler)
    for step, (tokens,) in enumerate(loader):
        loss = next_token_loss(model(tokens), tokens)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        say(step, loss)


if __name__ == "__main__":
    run(main)
