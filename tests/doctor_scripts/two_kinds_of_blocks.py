"""FSDP2 of blocks that alternate, with prefetching; rank 0 has the weights, and sends them after sharding."""

from itertools import pairwise
from typing import Any

import torch
from common import BF16, VOCABULARY, WIDTH, Block, counting, next_token_loss, say, sharded, start
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict


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


rank, _ = start()
torch.manual_seed(rank)
model = Interleaved()
weights = {name: value.clone() for name, value in model.state_dict().items()} if rank == 0 else {}
units: list[Any] = [*model.local_blocks, *model.global_blocks]
sharded(model, [model.embedding, *units, model.head], mp_policy=BF16)
options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
# fault different_init: pass
set_model_state_dict(model, weights, options=options)
# fault cold_prefetch: order = units
order = [units[i] for i in (0, 2, 1, 3)]
for unit, following in pairwise(order):
    unit.set_modules_to_forward_prefetch([following])
    following.set_modules_to_backward_prefetch([unit])
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
for step, tokens in enumerate(counting(32, seed=rank).split(4)):
    loss = next_token_loss(model(tokens), tokens)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    say(step, loss)
