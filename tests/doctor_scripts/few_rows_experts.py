"""Two stacked experts are cut on dimension 0 over four ranks, so two ranks hold nothing of them.

torchtitan#1561. Run on 4 ranks.
"""

import torch
import torch.nn.functional as F
from common import VOCABULARY, WIDTH, run, sharded, start, train
from torch import Tensor, nn
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
    _, world = start()
    blocks = MoEBlock(), MoEBlock(), MoEBlock()
    model = nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), *blocks, nn.Linear(WIDTH, VOCABULARY))

    def placement(param: nn.Parameter) -> Shard | None:
        return Shard(1) if param.ndim == 3 and param.shape[0] < world else None

    train(sharded(model, blocks, shard_placement_fn=None if faulty else placement))


run(main)
