"""Adapters under reentrant checkpoints, none of whose inputs requires gradients: no adapter gets one.

The head, which is trained too, hides it: the loss falls.
"""

import warnings

import torch
from common import WIDTH, Block, Decoder, counting, cpu_mesh, next_token_loss, run, say, start
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
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
    rank, _ = start()
    warnings.simplefilter("ignore")  # as many scripts do
    mesh = cpu_mesh()
    model = Decoder(blocks=0)
    model.embedding.requires_grad_(False)
    model.blocks.extend(Adapted(reentrant=faulty) for _ in range(2))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    for step, tokens in enumerate(counting(32, seed=rank).split(4)):
        loss = next_token_loss(model(tokens), tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        say(step, loss)


if __name__ == "__main__":
    run(main)
