"""A position embedding [1, 8192, 128] has one row, so rank 0 holds all of it and of its state.

torchvision's ViT has such a parameter.
"""

import torch
from common import WIDTH, Decoder, run, sharded, start, train
from torch import Tensor, nn
from torch.distributed.tensor import Shard


class Positioned(Decoder):
    def __init__(self, longest: int = 8192) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.randn(1, longest, WIDTH) * 0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.position[:, : tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def main(faulty: bool) -> None:
    _, world = start()

    def placement(p: nn.Parameter) -> Shard | None:
        return Shard(1) if p.shape[0] < world else None

    train(sharded(Positioned(), shard_placement_fn=None if faulty else placement))


run(main)
