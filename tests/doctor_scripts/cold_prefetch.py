"""Blocks are prefetched in the order of their definition, but the forward uses them in another order."""

from itertools import pairwise

import torch
from common import VOCABULARY, WIDTH, Block, counting, cpu_mesh, next_token_loss, run, say, start
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard


class Interleaved(nn.Module):
    """Local blocks are defined first and global blocks after them; the forward alternates between the two."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.local_blocks = nn.ModuleList(Block() for _ in range(2))
        self.global_blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for near, far in zip(self.local_blocks, self.global_blocks, strict=True):
            x = far(near(x))
        return self.head(x)


def main(faulty: bool) -> None:
    rank, _ = start()
    mesh = cpu_mesh()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = Interleaved()
    defined = [*model.local_blocks, *model.global_blocks]
    units = [fully_shard(block, mesh=mesh, mp_policy=policy) for block in defined]
    fully_shard(model, mesh=mesh, mp_policy=policy)
    order = units if faulty else [units[i] for i in (0, 2, 1, 3)]
    for unit, following in pairwise(order):
        unit.set_modules_to_forward_prefetch([following])
        following.set_modules_to_backward_prefetch([unit])
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
