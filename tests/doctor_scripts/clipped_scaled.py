"""Gradients are clipped before the GradScaler unscales them (Pytorch-UNet#468)."""

import torch
from common import Decoder, counting, next_token_loss, run, say, start
from torch.nn.parallel import DistributedDataParallel


def main(faulty: bool) -> None:
    rank, _ = start()
    model = DistributedDataParallel(Decoder())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu")
    for step, tokens in enumerate(counting(32, seed=rank).split(4)):
        with torch.autocast("cpu", torch.float16):
            loss = next_token_loss(model(tokens), tokens)
        scaler.scale(loss).backward()
        if not faulty:
            scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        say(step, loss)


run(main)
