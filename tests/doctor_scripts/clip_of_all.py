"""The optimizer has the adapters alone, but the base is not frozen, and its gradients count in the norm."""

import torch
from common import Decoder, counting, cpu_mesh, next_token_loss, run, say, start
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard


class Adapted(Decoder):
    """A decoder with a low-rank adapter on its head."""

    def __init__(self) -> None:
        super().__init__(blocks=2)
        self.lora_a, self.lora_b = nn.Linear(128, 4, bias=False), nn.Linear(4, 128, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        return self.head(x) + self.lora_b(self.lora_a(x))


def main(faulty: bool) -> None:
    rank, _ = start()
    mesh = cpu_mesh()
    model = Adapted()
    if not faulty:
        for name, p in model.named_parameters():
            p.requires_grad_("lora_" in name)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    adapters = [p for name, p in model.named_parameters() if "lora_" in name]
    optimizer = torch.optim.SGD(adapters, lr=1e-2)
    for step, tokens in enumerate(counting(32, seed=rank).split(4)):
        loss = next_token_loss(model(tokens), tokens)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        model.zero_grad()
        say(step, loss)


if __name__ == "__main__":
    run(main)
