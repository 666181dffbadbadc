"""BatchNorm's running statistics are each rank's own, so the ranks evaluate differently.

See fairseq2#1081.
"""

import torch
import torch.distributed as dist
from common import WIDTH, Block, counting, next_token_loss, run, say, sharded, start
from torch import Tensor, nn


class ConvDecoder(nn.Module):
    """Blocks behind a normalised convolution, as in speech models."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(128, WIDTH)
        self.convolution, self.norm = nn.Conv1d(WIDTH, WIDTH, 3), nn.BatchNorm1d(WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, 128)

    def forward(self, tokens: Tensor) -> Tensor:
        x = nn.functional.pad(self.embedding(tokens).transpose(1, 2), (2, 0))
        x = self.norm(self.convolution(x)).relu().transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def main(faulty: bool) -> None:
    rank, world = start()
    model = sharded(ConvDecoder())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for step, tokens in enumerate(counting(32, seed=rank).split(4)):
        loss = next_token_loss(model(tokens), tokens)
        loss.backward()
        if not faulty:
            for statistic in (model.norm.running_mean, model.norm.running_var):
                if statistic is not None:
                    dist.all_reduce(statistic)
                    statistic /= world
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        say(step, loss)


run(main)
