"""An IterableDataset gives all ranks the same stream (datasets#5360)."""

from collections.abc import Iterator
from itertools import islice

from common import Decoder, counting, run, sharded, start, train
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset


class Stream(IterableDataset[Tensor]):
    def __init__(self, rank: int, world: int) -> None:
        self.rank, self.world = rank, world

    def __iter__(self) -> Iterator[Tensor]:
        return islice(counting(64), self.rank, None, self.world)


def main(faulty: bool) -> None:
    rank, world = start()
    stream = Stream(0, 1) if faulty else Stream(rank, world)
    train(sharded(Decoder()), batches=DataLoader(stream, batch_size=4))


run(main)
