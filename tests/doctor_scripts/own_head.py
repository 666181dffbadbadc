"""FSDP2 with batch norm, and with a head that FSDP ignores (torchtitan#670, fairseq2#1081)."""

import torch
import torch.distributed as dist
from common import VOCABULARY, WIDTH, Block, counting, say, sharded, start
from torch import Tensor, nn


class Regressor(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.convolution, self.norm = nn.Conv1d(WIDTH, WIDTH, 3), nn.BatchNorm1d(WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.value_head = nn.Linear(WIDTH, 1)

    def forward(self, tokens: Tensor) -> Tensor:
        x = nn.functional.pad(self.embedding(tokens).transpose(1, 2), (2, 0))
        x = self.norm(self.convolution(x)).relu().transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        return self.value_head(x.mean(1)).squeeze(-1)


rank, world = start()
model = Regressor()
torch.manual_seed(1000 + rank)  # for dropout and the data
model.value_head.reset_parameters()
head = list(model.value_head.parameters())
for param in head:
    # fault replicas_differ: pass
    dist.broadcast(param.detach(), src=0)
sharded(model, model.blocks, ignored_params=set(head))
body = [param for name, param in model.named_parameters() if not name.startswith("value_head")]
optimizer = torch.optim.SGD([{"params": body}, {"params": head}], lr=1e-2)
for step, tokens in enumerate(counting(32, seed=rank).split(4)):
    loss = (model(tokens) - tokens.float().mean(1) / 128).square().mean()
    loss.backward()
    statistics = [model.norm.running_mean, model.norm.running_var]
    # fault buffers_differ: statistics = []
    statistics = [one for one in statistics if one is not None]
    for one in [*statistics, *(p.grad for p in head if p.grad is not None)]:  # FSDP leaves these alone
        dist.all_reduce(one)
        one /= world
    torch.nn.utils.clip_grad_norm_(body, 1.0)
    optimizer.step()
    optimizer.zero_grad()
    say(step, loss)
