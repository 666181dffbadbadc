"""FSDP2 in float32 on a stream of micro-batches, with tied weights and with generation after each step."""

from collections.abc import Iterator
from itertools import islice

import torch
from common import WIDTH, Decoder, counting, next_token_loss, say, sharded, start
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import Shard
from torch.utils.data import DataLoader, IterableDataset


class Positioned(Decoder):
    def __init__(self) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.randn(1, 8192, WIDTH) * 0.02)  # one row, as in torchvision's ViT

    def encode(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.position[:, : tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


class Stream(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        # fault same_stream: return iter(counting(64))
        return islice(counting(128), rank, None, world)


@torch.no_grad()
def generate(tokens: Tensor) -> None:
    units = [one for one in model.modules() if isinstance(one, FSDPModule)]
    for unit in units:
        # fault gathers_per_token: pass
        unit.set_reshard_after_forward(False, recurse=False)
    for _ in range(12):
        tokens = torch.cat([tokens, model(tokens)[:, -1:].argmax(-1)], dim=1)
    for unit in units:
        unit.set_reshard_after_forward(unit is not model, recurse=False)  # the root's default is False
        unit.reshard()


rank, world = start()
model = Positioned()
model.head.weight = model.embedding.weight
# fault few_rows: placement = None
placement = lambda p: Shard(1) if p.shape[0] < world else None  # noqa: E731
# fault tied_units: units = [*model.blocks, model.embedding, model.head]
units = [*model.blocks, [model.embedding, model.norm, model.head]]
sharded(model, units, shard_placement_fn=placement)
with torch.no_grad():
    model(counting(4))
# fault optimizer_before_shard: pass
model.reshard()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
for step, batch in enumerate(DataLoader(Stream(), batch_size=8)):
    for i, tokens in enumerate(batch.chunk(2)):
        # fault sync_off: model.set_requires_gradient_sync(False)
        # fault sync_each_micro_batch: model.set_requires_gradient_sync(True)
        model.set_requires_gradient_sync(i == 1)
        loss = next_token_loss(model(tokens), tokens)
        loss.backward()
    for grad in [p.grad for p in model.parameters() if p.grad is not None]:
        # fault undivided_losses: pass
        grad /= 2
    torch.nn.utils.clip_grad_norm_(model.parameters(), 100.0)
    optimizer.step()
    optimizer.zero_grad()
    say(step, loss)
    generate(counting(1, length=4))
