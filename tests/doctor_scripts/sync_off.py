"""Gradient sync stays off at the last micro-batch, so the optimizer's step has no gradients."""

import torch
from common import Decoder, counting, cpu_mesh, next_token_loss, run, say, start
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

MICRO_BATCHES = 2


def main(faulty: bool) -> None:
    rank, _ = start()
    mesh = cpu_mesh()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = Decoder()
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    assert isinstance(model, FSDPModule)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)

    last = MICRO_BATCHES if faulty else MICRO_BATCHES - 1
    for step, samples in enumerate(counting(64, seed=rank).split(4 * MICRO_BATCHES)):
        total = torch.zeros(())
        for i, tokens in enumerate(samples.chunk(MICRO_BATCHES)):
            model.set_requires_gradient_sync(i == last)
            loss = next_token_loss(model(tokens), tokens) / MICRO_BATCHES
            loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        say(step, total)


if __name__ == "__main__":
    run(main)
