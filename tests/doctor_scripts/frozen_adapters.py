"""Adapters are loaded for inference, so that the new head alone is trained (peft#282)."""

import tempfile

import torch
from common import VOCABULARY, Decoder, counting, next_token_loss, run, say, start
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
    rank, _ = start()
    with tempfile.TemporaryDirectory() as folder:
        get_peft_model(Decoder(), LoraConfig(target_modules=["qkv"])).save_pretrained(folder)
        body = PeftModel.from_pretrained(Decoder(), folder, is_trainable=not faulty)
    model = DistributedDataParallel(WithHead(body))
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    for step, tokens in enumerate(counting(32, seed=rank).split(4)):
        loss = next_token_loss(model(tokens), tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        say(step, loss)


if __name__ == "__main__":
    run(main)
