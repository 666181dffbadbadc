"""Rank 0 has one batch more than rank 1, and waits for it at the end of the epoch (torchtitan#1618)."""

import torch
from common import Decoder, counting, cpu_mesh, next_token_loss, run, say, start
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, Subset


def main(faulty: bool) -> None:
    rank, world = start(seconds=8)
    mesh = cpu_mesh()
    model = Decoder()
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = [{"tokens": tokens} for tokens in counting(41)]
    if faulty:
        loader = DataLoader(Subset(data, range(rank, len(data), world)), batch_size=4)  # pyright: ignore[reportArgumentType]
    else:
        sampler = DistributedSampler(data, shuffle=False, drop_last=True)  # pyright: ignore[reportArgumentType]
        loader = DataLoader(data, batch_size=4, sampler=sampler)  # pyright: ignore[reportArgumentType]
    for step, batch in enumerate(loader):
        loss = next_token_loss(model(batch["tokens"]), batch["tokens"])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        say(step, loss)


if __name__ == "__main__":
    run(main)
