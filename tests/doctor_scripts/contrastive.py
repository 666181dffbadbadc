"""DDP in fp16, whose features are gathered: into copies, and by a function that autograd knows."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import WIDTH, counting, say, start
from torch import Tensor, nn
from torch.distributed.nn.functional import all_gather
from torch.nn.parallel import DistributedDataParallel as DDP


class TwoTowers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(16, WIDTH), nn.Linear(16, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return F.normalize(self.left(x).float(), dim=-1), F.normalize(self.right(x).float(), dim=-1)


rank, world = start()
model = DDP(TwoTowers())
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
labels = torch.arange(8) + 8 * rank
for step, tokens in enumerate(counting(64, seed=rank).split(8)):
    with torch.autocast("cpu", torch.float16):
        left, right = model(tokens / 128)
    copies = [torch.empty_like(left) for _ in range(world)]
    dist.all_gather(copies, left)
    # fault copies_without_gradient: pass
    copies[rank] = left
    everyone = torch.cat(all_gather(right))
    loss = F.cross_entropy(left @ everyone.T, labels) + F.cross_entropy(right @ torch.cat(copies).T, labels)
    scaler.scale(loss).backward()
    # fault clipped_scaled: pass
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    dist.all_gather([torch.empty_like(left) for _ in range(world)], left)  # to log them
    say(step, loss)
