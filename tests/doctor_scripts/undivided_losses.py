"""Four micro-batches' losses are summed up, where the batch's loss is their mean (verl#3332)."""

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
    for step, samples in enumerate(counting(64, seed=rank).split(4 * MICRO_BATCHES)):
        total = torch.zeros(())
        for i, tokens in enumerate(samples.chunk(MICRO_BATCHES)):
            model.set_requires_gradient_sync(i == MICRO_BATCHES - 1)
            loss = next_token_loss(model(tokens), tokens)
            (loss if faulty else loss / MICRO_BATCHES).backward()
            total += loss.detach() / MICRO_BATCHES
        torch.nn.utils.clip_grad_norm_(model.parameters(), 100.0)
        optimizer.step()
        optimizer.zero_grad()
        say(step, total)


if __name__ == "__main__":
    run(main)
