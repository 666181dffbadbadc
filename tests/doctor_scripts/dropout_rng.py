"""Checkpointed blocks draw other dropout masks when they run again: preserve_rng_state is off.

Accelerate wraps the blocks of an FSDP2 model like this.
"""

import torch
from common import Block, Decoder, counting, cpu_mesh, next_token_loss, run, say, start
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint


class CheckpointedBlock(Block):
    preserve_rng_state = True

    def forward(self, x: Tensor) -> Tensor:
        run_block = super().forward
        return checkpoint(run_block, x, use_reentrant=False, preserve_rng_state=self.preserve_rng_state)


def main(faulty: bool) -> None:
    rank, _ = start()
    mesh = cpu_mesh()
    CheckpointedBlock.preserve_rng_state = not faulty
    model = Decoder(blocks=0)
    for _ in range(3):
        model.blocks.append(CheckpointedBlock(dropout=0.1))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    torch.manual_seed(rank)  # each rank draws its own dropout masks
    for step, tokens in enumerate(counting(32, seed=rank).split(4)):
        loss = next_token_loss(model(tokens), tokens)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        say(step, loss)


if __name__ == "__main__":
    run(main)
