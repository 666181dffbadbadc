"""FSDP2 of a plain Sequential; a sensor of rank 1 fails (NaN), and all ranks skip that batch."""

import torch
import torch.distributed as dist
from common import Block, say, sharded, start
from torch import nn

CHANNELS = 8
rank, _ = start(seconds=8)
phase = torch.rand(32, 1, CHANNELS, generator=torch.Generator().manual_seed(rank))
readings = torch.sin(torch.arange(16).view(1, 16, 1) / 3 + 6 * phase)
if rank == 1:
    readings[6, 9, 3] = float("nan")
model = nn.Sequential(nn.Linear(CHANNELS, 128), Block(), Block(), Block(), nn.Linear(128, CHANNELS))
sharded(model, model)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
for step, waves in enumerate(readings.split(4)):
    # fault forward_of_part: predicted = model.forward(waves)
    predicted = model(waves)
    loss = (predicted[:, :-1] - waves[:, 1:]).square().mean()
    is_bad = torch.isnan(loss.detach()).float()
    # fault ranks_part: pass
    dist.all_reduce(is_bad)
    # fault bad_gradients: if False:
    if is_bad:
        continue
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    say(step, loss)
