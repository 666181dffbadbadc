"""Embedding and head share one weight but are two units (lingua#84, Automodel#2213)."""

import torch
from common import Decoder, counting, cpu_mesh, next_token_loss, run, say, start
from torch.distributed.fsdp import fully_shard


def main(faulty: bool) -> None:
    rank, _ = start()
    mesh = cpu_mesh()
    model = Decoder()
    model.head.weight = model.embedding.weight
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    if faulty:
        fully_shard(model.embedding, mesh=mesh)
        fully_shard(model.head, mesh=mesh)
    else:
        fully_shard([model.embedding, model.norm, model.head], mesh=mesh)
    fully_shard(model, mesh=mesh)
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
