"""A missing reading of rank 1 (NaN) is not filled in the second step, and all weights become NaN."""

import torch
from common import Block, cpu_mesh, run, say, start
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

CHANNELS = 8


def readings(rank: int) -> Tensor:
    """Waves of several sensors; a sensor of rank 1 fails for one sample of its second batch."""
    phase = torch.rand(32, 1, CHANNELS, generator=torch.Generator().manual_seed(rank))
    waves = torch.sin(torch.arange(16).view(1, 16, 1) / 3 + 6 * phase)
    if rank == 1:
        waves[6, 9, 3] = float("nan")
    return waves


def main(faulty: bool) -> None:
    rank, _ = start()
    mesh = cpu_mesh()
    model = nn.Sequential(nn.Linear(CHANNELS, 128), Block(), Block(), Block(), nn.Linear(128, CHANNELS))
    for module in model:
        if isinstance(module, Block):
            fully_shard(module, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for step, waves in enumerate(readings(rank).split(4)):
        if not faulty:
            waves = waves.nan_to_num(0.0)
        loss = (model(waves)[:, :-1] - waves[:, 1:]).square().mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        say(step, loss)


if __name__ == "__main__":
    run(main)
