"""Gradients are reduced at each of four micro-batches, where once per step is enough (transformers#29425)."""

import torch
from common import Decoder, counting, cpu_mesh, next_token_loss, run, say, start
from torch.distributed.fsdp import FSDPModule, fully_shard

MICRO_BATCHES = 4


def main(faulty: bool) -> None:
    rank, _ = start()
    mesh = cpu_mesh()
    model = Decoder(blocks=2)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    assert isinstance(model, FSDPModule)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    data = iter(counting(96, seed=rank).split(4))
    for step in range(6):
        total = torch.zeros(())
        for micro_batch in range(MICRO_BATCHES):
            if not faulty:
                model.set_requires_gradient_sync(micro_batch == MICRO_BATCHES - 1)
            tokens = next(data)
            loss = next_token_loss(model(tokens), tokens)
            (loss / MICRO_BATCHES).backward()
            total += loss.detach() / MICRO_BATCHES
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        say(step, total)


if __name__ == "__main__":
    run(main)
