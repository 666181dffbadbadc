"""Activations are gathered; the right twin puts the rank's own back. Both gather them to log them later."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import WIDTH, counting, run, say, start
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def main(faulty: bool) -> None:
    rank, world = start()
    model = DDP(nn.Linear(16, WIDTH))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for step, tokens in enumerate(counting(64, seed=rank).split(8)):
        features = F.normalize(model(tokens / 128), dim=-1)
        copies = [torch.empty_like(features) for _ in range(world)]
        dist.all_gather(copies, features)
        if not faulty:
            copies[rank] = features
        loss = F.cross_entropy(10 * features @ torch.cat(copies).T, torch.arange(8) + 8 * rank)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        dist.all_gather([torch.empty_like(features) for _ in range(world)], features)  # to log them
        say(step, loss)


run(main)
