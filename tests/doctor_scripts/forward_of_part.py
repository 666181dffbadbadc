"""The loss calls a method of the sharded model that is not its forward, so no hook gathers.

See WeatherGenerator#1639.
"""

import torch
from common import Decoder, counting, cpu_mesh, next_token_loss, run, say, start
from torch import Tensor
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method


class Embedder(Decoder):
    def encode(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


def main(faulty: bool) -> None:
    rank, _ = start()
    mesh = cpu_mesh()
    model = Embedder()
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    if not faulty:
        register_fsdp_forward_method(model, "encode")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step, tokens in enumerate(counting(32, seed=rank).split(4)):
        loss = next_token_loss(model(tokens), tokens)
        first, second = model.encode(tokens).mean(1).chunk(2)
        loss = loss + 0.1 * torch.cosine_similarity(first, second).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        say(step, loss)


if __name__ == "__main__":
    run(main)
