"""The loop calls model.forward(x), not model(x): no hook of the root runs, and each unit acts as a root.

See WeatherGenerator#1639.
"""

import torch
from common import VOCABULARY, WIDTH, Block, counting, cpu_mesh, next_token_loss, run, say, start
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def main(faulty: bool) -> None:
    rank, _ = start()
    mesh = cpu_mesh()
    model = Decoder()
    for unit in (model.embedding, *model.blocks, model.head):
        fully_shard(unit, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for step, tokens in enumerate(counting(32, seed=rank).split(4)):
        logits = model.forward(tokens) if faulty else model(tokens)
        loss = next_token_loss(logits, tokens)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        say(step, loss)


if __name__ == "__main__":
    run(main)
