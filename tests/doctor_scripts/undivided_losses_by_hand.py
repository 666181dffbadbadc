"""Micro-batches' losses are summed up, by a function; the right twin divides the gradients."""

import contextlib

from common import Decoder, next_token_loss, run, start, train_in_micro_batches
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel as DDP

MICRO_BATCHES = 2


def main(faulty: bool) -> None:
    start()
    model = DDP(Decoder())

    def backward(i: int, tokens: Tensor) -> Tensor:
        is_last = i == MICRO_BATCHES - 1
        with contextlib.nullcontext() if is_last else model.no_sync():
            loss = next_token_loss(model(tokens), tokens)
            loss.backward()
        for p in model.parameters() if is_last and not faulty else ():
            if p.grad is not None:
                p.grad /= MICRO_BATCHES
        return loss / MICRO_BATCHES

    train_in_micro_batches(model, MICRO_BATCHES, backward)


run(main)
