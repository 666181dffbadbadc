"""An IterableDataset gives all ranks the same stream (datasets#5360)."""

from collections.abc import Iterator
from itertools import islice

import torch
from common import Decoder, counting, cpu_mesh, next_token_loss, run, say, start
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, IterableDataset


class Stream(IterableDataset[Tensor]):
    def __init__(self, rank: int, world: int) -> None:
        self.rank, self.world = rank, world

    def __iter__(self) -> Iterator[Tensor]:
        return islice(counting(64), self.rank, None, self.world)


def main(faulty: bool) -> None:
    rank, world = start()
    mesh = cpu_mesh()
    model = Decoder()
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    stream = Stream(0, 1) if faulty else Stream(rank, world)
    for step, tokens in enumerate(DataLoader(stream, batch_size=4)):
        loss = next_token_loss(model(tokens), tokens)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        say(step, loss)


if __name__ == "__main__":
    run(main)
