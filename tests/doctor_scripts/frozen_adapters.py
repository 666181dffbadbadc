"""Adapters are loaded for inference, so that the new head alone is trained (peft#282)."""

import tempfile

import torch
from common import VOCABULARY, Decoder, run, start, train
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel


class WithHead(nn.Module):
    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body, self.head = body, nn.Linear(VOCABULARY, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.body(tokens))


def main(faulty: bool) -> None:
    start()
    with tempfile.TemporaryDirectory() as folder:
        get_peft_model(Decoder(blocks=3), LoraConfig(target_modules=["qkv"])).save_pretrained(folder)
        body = PeftModel.from_pretrained(Decoder(blocks=3), folder, is_trainable=not faulty)
    model = DistributedDataParallel(WithHead(body))
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    train(model, optimizer)


run(main)
