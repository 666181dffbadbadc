"""One block's activations of a long sequence far exceed all shards, and nothing is checkpointed."""

from common import Block, Decoder, counting, run, sharded, start, train
from torch import Tensor
from torch.utils.checkpoint import checkpoint


class CheckpointedBlock(Block):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


def main(faulty: bool) -> None:
    rank, _ = start()
    model = Decoder(blocks=0, width=64)
    for _ in range(2):
        model.blocks.append(Block(width=64) if faulty else CheckpointedBlock(width=64))
    train(sharded(model), batches=counting(10, length=1024, seed=rank).split(2))


run(main)
