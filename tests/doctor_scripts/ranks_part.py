"""Rank 0 alone averages the loss for its log, a collective that the other rank does not call.

pytorch#77562 is of this kind.
"""

import torch
import torch.distributed as dist
from common import Decoder, counting, cpu_mesh, next_token_loss, run, start
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard


def main(faulty: bool) -> None:
    rank, world = start(seconds=8)
    mesh = cpu_mesh()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = Decoder()
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for step, tokens in enumerate(counting(32, seed=rank).split(4)):
        loss = next_token_loss(model(tokens), tokens)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach()
        if not faulty:
            dist.all_reduce(mean)
        if rank == 0:
            if faulty:
                dist.all_reduce(mean)
            print(f"step {step}: loss {mean.item() / world:.4f}", flush=True)


if __name__ == "__main__":
    run(main)
