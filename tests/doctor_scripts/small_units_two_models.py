"""Two models in one container: every linear layer is a unit; in the right twin each block, and each model."""

import torch
from common import Decoder, counting, cpu_mesh, next_token_loss, run, say, start
from torch import nn
from torch.distributed.fsdp import fully_shard


def main(faulty: bool) -> None:
    rank, _ = start()
    mesh = cpu_mesh()
    model = nn.ModuleDict({"policy": Decoder(blocks=2), "value": Decoder(blocks=2)})
    for part in model.values():
        assert isinstance(part, Decoder)
        for block in part.blocks:
            for module in (
                [one for one in block.modules() if isinstance(one, nn.Linear)] if faulty else [block]
            ):
                fully_shard(module, mesh=mesh)
        fully_shard(part, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for step, tokens in enumerate(counting(32, seed=rank).split(4)):
        loss = next_token_loss(model["policy"](tokens), tokens) + next_token_loss(
            model["value"](tokens), tokens
        )
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        say(step, loss)


if __name__ == "__main__":
    run(main)
