"""Activations are gathered into one tensor; the right twin puts the rank's own back. Both log them later."""

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
        both = features.new_empty(8 * world, WIDTH)
        dist.all_gather_into_tensor(both, features)
        if not faulty:
            both[8 * rank : 8 * rank + 8] = features
        loss = F.cross_entropy(10 * features @ both.T, torch.arange(8) + 8 * rank)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        dist.all_gather_into_tensor(torch.empty_like(both.detach()), features)  # to log them
        say(step, loss)


if __name__ == "__main__":
    run(main)
