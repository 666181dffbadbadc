"""A head that FSDP ignores is initialised with another seed on each rank, and stays different.

See torchtitan#670.
"""

import torch
import torch.distributed as dist
from common import WIDTH, Block, counting, run, say, sharded, start
from torch import Tensor, nn


class Regressor(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(128, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.value_head = nn.Linear(WIDTH, 1)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.value_head(x.mean(1)).squeeze(-1)


def main(faulty: bool) -> None:
    rank, world = start()
    model = Regressor()
    torch.manual_seed(1000 + rank)  # for dropout and the data
    model.value_head.reset_parameters()
    head = list(model.value_head.parameters())
    if not faulty:
        for param in head:
            dist.broadcast(param.detach(), src=0)
    sharded(model, ignored_params=set(head))
    body = [param for name, param in model.named_parameters() if not name.startswith("value_head")]
    optimizer = torch.optim.SGD([{"params": body}, {"params": head}], lr=1e-2)
    for step, tokens in enumerate(counting(32, seed=rank).split(4)):
        loss = (model(tokens) - tokens.float().mean(1) / 128).square().mean()
        loss.backward()
        for param in head:  # FSDP leaves ignored gradients alone
            if param.grad is not None:
                dist.all_reduce(param.grad)
                param.grad /= world
        torch.nn.utils.clip_grad_norm_(body, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        say(step, loss)


run(main)
