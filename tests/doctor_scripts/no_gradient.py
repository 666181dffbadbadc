"""Adapters under reentrant checkpoints, none of whose inputs requires gradients: no adapter gets one.

The head, which is trained too, hides it: the loss falls.
"""

import warnings

import torch
from common import WIDTH, Block, Decoder, run, sharded, start, train
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class Adapted(Block):
    """A block with a low-rank adapter beside it."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.requires_grad_(False)
        self.reentrant = reentrant
        self.lora_a, self.lora_b = nn.Linear(WIDTH, 4, bias=False), nn.Linear(4, WIDTH, bias=False)

    def adapted(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.lora_b(self.lora_a(x))

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.adapted, x, use_reentrant=self.reentrant)


def main(faulty: bool) -> None:
    start()
    warnings.simplefilter("ignore")  # as many scripts do
    model = Decoder(blocks=0)
    model.embedding.requires_grad_(False)
    model.blocks.extend(Adapted(reentrant=faulty) for _ in range(2))
    sharded(model)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    train(model, optimizer)


run(main)
