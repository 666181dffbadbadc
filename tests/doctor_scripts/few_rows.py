"""A position embedding [1, 8192, 128] has one row, so rank 0 holds all of it and of its state.

torchvision's ViT has such a parameter.
"""

import torch
from common import VOCABULARY, Block, counting, cpu_mesh, next_token_loss, run, say, start
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard


class Decoder(nn.Module):
    def __init__(self, width: int = 128, longest: int = 8192) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.position = nn.Parameter(torch.randn(1, longest, width) * 0.02)
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.position[:, : tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def main(faulty: bool) -> None:
    rank, world = start()
    mesh = cpu_mesh()
    model = Decoder()
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    if faulty:
        fully_shard(model, mesh=mesh)
    else:
        fully_shard(model, mesh=mesh, shard_placement_fn=lambda p: Shard(1) if p.shape[0] < world else None)
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
