"""DDP of bfloat16 parameters, reduced in float32; AdamW trains float32 copies, which are copied back."""

from typing import Any

import torch
import torch.distributed as dist
from common import Decoder, counting, next_token_loss, say, start
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel


def reduce_in_float32(_: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    work: Any = dist.all_reduce(bucket.buffer().float() / dist.get_world_size(), async_op=True)
    return work.get_future().then(lambda done: bucket.buffer().copy_(done.value()[0]))


rank, _ = start()
model = DistributedDataParallel(Decoder(blocks=3).bfloat16())
# fault bf16_reduce: pass
model.register_comm_hook(None, reduce_in_float32)
copies = [p.detach().float() for p in model.parameters()]
optimizer = torch.optim.AdamW(copies, lr=1e-3)
for step, tokens in enumerate(counting(32, seed=rank).split(4)):
    loss = next_token_loss(model(tokens), tokens)
    loss.backward()
    for p, master in zip(model.parameters(), copies, strict=True):
        master.grad, p.grad = p.grad.float() if p.grad is not None else None, None
    optimizer.step()
    with torch.no_grad():
        for p, master in zip(model.parameters(), copies, strict=True):
            p.copy_(master)
    say(step, loss)
