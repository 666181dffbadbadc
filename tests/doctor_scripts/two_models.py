"""FSDP2 of two models in one container."""

import torch
from common import Decoder, counting, next_token_loss, say, sharded, start
from torch import nn

rank, _ = start()
model = nn.ModuleDict({"policy": Decoder(), "value": Decoder()})
for part in model.values():
    # fault small_units: units = [one for one in part.blocks.modules() if isinstance(one, nn.Linear)]
    units = part.blocks
    sharded(part, units)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
for step, tokens in enumerate(counting(32, seed=rank).split(4)):
    loss = next_token_loss(model["policy"](tokens), tokens) + next_token_loss(model["value"](tokens), tokens)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    say(step, loss)
