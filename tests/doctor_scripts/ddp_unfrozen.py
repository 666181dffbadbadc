"""Blocks are frozen when DDP wraps the model and unfrozen later, so DDP does not average their gradients."""

import torch
from common import Decoder, counting, next_token_loss, run, say, start
from torch.nn.parallel import DistributedDataParallel as DDP


def main(faulty: bool) -> None:
    rank, _ = start()
    decoder = Decoder()
    decoder.blocks.requires_grad_(False)
    model = DDP(decoder)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for step, tokens in enumerate(counting(32, seed=rank).split(4)):
        if step == 1:
            decoder.blocks.requires_grad_(True)
            if not faulty:
                model = DDP(decoder)
        loss = next_token_loss(model(tokens), tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        say(step, loss)


run(main)
