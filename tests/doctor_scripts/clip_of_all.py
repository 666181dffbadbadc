"""The optimizer has the adapters alone, but the base is not frozen, and its gradients count in the norm."""

import torch
from common import Decoder, run, sharded, start, train
from torch import Tensor, nn


class Adapted(Decoder):
    """A decoder with a low-rank adapter on its head."""

    def __init__(self) -> None:
        super().__init__()
        self.lora_a, self.lora_b = nn.Linear(128, 4, bias=False), nn.Linear(4, 128, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.encode(tokens)
        return self.head(x) + self.lora_b(self.lora_a(x))


def main(faulty: bool) -> None:
    start()
    model = Adapted()
    if not faulty:
        for name, p in model.named_parameters():
            p.requires_grad_("lora_" in name)
    sharded(model)
    adapters = [p for name, p in model.named_parameters() if "lora_" in name]
    train(model, torch.optim.SGD(adapters, lr=1e-2), limit=0.1, after_step=lambda *_: model.zero_grad())


run(main)
