"""The loop calls model.forward(x), not model(x): no hook of the root runs, and each unit acts as a root.

See WeatherGenerator#1639.
"""

import torch
from common import Decoder, counting, cpu_mesh, next_token_loss, run, say, start
from torch.distributed.fsdp import fully_shard


def main(faulty: bool) -> None:
    rank, _ = start()
    mesh = cpu_mesh()
    model = Decoder()
    for unit in (model.embedding, *model.blocks, [model.norm, model.head]):
        fully_shard(unit, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step, tokens in enumerate(counting(32, seed=rank).split(4)):
        logits = model.forward(tokens) if faulty else model(tokens)
        loss = next_token_loss(logits, tokens)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        say(step, loss)


if __name__ == "__main__":
    run(main)
