"""FSDP2 of adapters of peft on a frozen, checkpointed decoder, with a new head beside them."""

import tempfile

import torch
from common import VOCABULARY, Decoder, counting, next_token_loss, say, sharded, start
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn


class WithHead(nn.Module):
    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body, self.head = body, nn.Linear(VOCABULARY, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.body(tokens))


rank, _ = start()
# fault no_gradient: options = {"use_reentrant": True}
options = {"use_reentrant": False}
with tempfile.TemporaryDirectory() as folder:
    get_peft_model(Decoder(), LoraConfig(target_modules=["qkv"])).save_pretrained(folder)
    # fault frozen_adapters: body = PeftModel.from_pretrained(Decoder(**options), folder)
    body = PeftModel.from_pretrained(Decoder(**options), folder, is_trainable=True)
model = WithHead(body)
names = [name for name, p in model.named_parameters() if p.requires_grad]
# fault clip_of_all: model.requires_grad_(True)
model.head.requires_grad_(True)
sharded(model, body.base_model.model.blocks)
optimizer = torch.optim.SGD([p for name, p in model.named_parameters() if name in names], lr=1e-2)
for step, tokens in enumerate(counting(32, seed=rank).split(4)):
    loss = next_token_loss(model(tokens), tokens)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    model.zero_grad()
    say(step, loss)
