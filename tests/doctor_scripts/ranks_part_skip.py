"""A rank skips a batch whose loss is NaN by itself: it begins a forward, the other rank goes backward."""

import torch
import torch.distributed as dist
from common import CHANNELS, Block, readings, run, say, sharded, start
from torch import nn


def main(faulty: bool) -> None:
    rank, _ = start(seconds=8)
    model = nn.Sequential(nn.Linear(CHANNELS, 128), Block(), Block(), nn.Linear(128, CHANNELS))
    sharded(model, model[1:3])
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for step, waves in enumerate(readings(rank).split(4)):
        loss = (model(waves)[:, :-1] - waves[:, 1:]).square().mean()
        is_bad = torch.isnan(loss.detach()).float()
        if not faulty:
            dist.all_reduce(is_bad)
        if is_bad:
            continue
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        say(step, loss)


run(main)
