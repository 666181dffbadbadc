"""The trained parameters are bfloat16 themselves, so small updates are rounded away.

See accelerate#2624, trl#1224.
"""

import torch
from common import Decoder, counting, cpu_mesh, next_token_loss, run, say, start
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard


def main(faulty: bool) -> None:
    rank, _ = start()
    mesh = cpu_mesh()
    model = Decoder()
    if faulty:
        model = model.to(torch.bfloat16)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)

    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / 8)
    for step, tokens in enumerate(counting(32, seed=rank).split(4)):
        loss = next_token_loss(model(tokens), tokens)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
        say(step, loss)


if __name__ == "__main__":
    run(main)
