"""Two stacked experts are cut on dimension 0 over four ranks, so two ranks hold nothing of them.

torchtitan#1561. Run on 4 ranks.
"""

import torch
import torch.nn.functional as F
from common import VOCABULARY, WIDTH, counting, cpu_mesh, next_token_loss, run, say, start
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard

EXPERTS = 2


class MoEBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.router = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, EXPERTS)
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, 8 * WIDTH) / WIDTH**0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, 8 * WIDTH, WIDTH) / (8 * WIDTH) ** 0.5)
        self.mix = nn.Conv1d(WIDTH, WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mix(F.pad(x.transpose(1, 2), (2, 0))).transpose(1, 2)
        hidden = self.norm(x)
        weights = self.router(hidden).softmax(-1)
        each = torch.einsum("btw,ewh->bteh", hidden, self.up).relu()
        return x + torch.einsum("bteh,ehw,bte->btw", each, self.down, weights)


def main(faulty: bool) -> None:
    rank, world = start()
    mesh = cpu_mesh()
    model = nn.Sequential(
        nn.Embedding(VOCABULARY, WIDTH), MoEBlock(), MoEBlock(), MoEBlock(), nn.Linear(WIDTH, VOCABULARY)
    )

    def placement(param: nn.Parameter) -> Shard | None:
        return Shard(1) if param.ndim == 3 and param.shape[0] < world else None

    for module in model:
        if isinstance(module, MoEBlock):
            fully_shard(module, mesh=mesh, shard_placement_fn=None if faulty else placement)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for step, tokens in enumerate(counting(32, seed=rank).split(4)):
        loss = next_token_loss(model(tokens), tokens)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        say(step, loss)


if __name__ == "__main__":
    run(main)
