"""Micro-batches' losses are summed up, by a function; the right twin divides the gradients."""

import contextlib

import torch
from common import Decoder, counting, next_token_loss, run, say, start
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel as DDP

MICRO_BATCHES = 2


def backward(loss: Tensor) -> None:
    loss.backward()


def main(faulty: bool) -> None:
    rank, _ = start()
    model = DDP(Decoder(blocks=2))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for step, samples in enumerate(counting(64, seed=rank).split(4 * MICRO_BATCHES)):
        total = torch.zeros(())
        for i, tokens in enumerate(samples.chunk(MICRO_BATCHES)):
            with contextlib.nullcontext() if i == MICRO_BATCHES - 1 else model.no_sync():
                loss = next_token_loss(model(tokens), tokens)
                backward(loss)
            total += loss.detach() / MICRO_BATCHES
        for p in model.parameters():
            if p.grad is not None and not faulty:
                p.grad /= MICRO_BATCHES
        optimizer.step()
        optimizer.zero_grad()
        say(step, total)


if __name__ == "__main__":
    run(main)
