"""The loss calls a part of the sharded model, whose embedding the root's hook would have gathered.

See WeatherGenerator#1639.
"""

import torch
from common import VOCABULARY, WIDTH, Block, counting, cpu_mesh, next_token_loss, run, say, start
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return x


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.head = Encoder(), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.encoder(tokens)
        return hidden, self.head(hidden)


def main(faulty: bool) -> None:
    rank, _ = start()
    mesh = cpu_mesh()
    model = Model()
    for block in model.encoder.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for step, tokens in enumerate(counting(32, seed=rank).split(4)):
        if faulty:
            hidden = model.encoder(tokens)
            logits = model.head(hidden)
        else:
            hidden, logits = model(tokens)
        loss = next_token_loss(logits, tokens) + 0.01 * hidden.square().mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        say(step, loss)


if __name__ == "__main__":
    run(main)
