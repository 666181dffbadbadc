"""Blocks are prefetched in the order of their definition, but the forward uses them in another order."""

from itertools import pairwise
from typing import Any

from common import BF16, VOCABULARY, WIDTH, Block, run, sharded, start, train
from torch import Tensor, nn


class Interleaved(nn.Module):
    """Local blocks are defined first and global blocks after them; the forward alternates between the two."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.local_blocks = nn.ModuleList(Block() for _ in range(2))
        self.global_blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for near, far in zip(self.local_blocks, self.global_blocks, strict=True):
            x = far(near(x))
        return self.head(x)


def main(faulty: bool) -> None:
    start()
    model = Interleaved()
    units: list[Any] = [*model.local_blocks, *model.global_blocks]
    sharded(model, units, mp_policy=BF16)
    order = units if faulty else [units[i] for i in (0, 2, 1, 3)]
    for unit, following in pairwise(order):
        unit.set_modules_to_forward_prefetch([following])
        following.set_modules_to_backward_prefetch([unit])
    train(model)


run(main)
