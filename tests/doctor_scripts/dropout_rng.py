"""Checkpointed blocks draw other dropout masks when they run again: preserve_rng_state is off.

Accelerate wraps the blocks of an FSDP2 model like this.
"""

import torch
from common import Block, Decoder, run, sharded, start, train
from torch import Tensor
from torch.utils.checkpoint import checkpoint


class CheckpointedBlock(Block):
    preserve_rng_state = True

    def forward(self, x: Tensor) -> Tensor:
        run_block = super().forward
        return checkpoint(run_block, x, use_reentrant=False, preserve_rng_state=self.preserve_rng_state)


def main(faulty: bool) -> None:
    rank, _ = start()
    CheckpointedBlock.preserve_rng_state = not faulty
    model = Decoder(blocks=0)
    for _ in range(3):
        model.blocks.append(CheckpointedBlock(dropout=0.1))
    sharded(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    torch.manual_seed(rank)  # each rank draws its own dropout masks
    train(model, optimizer)


run(main)
