"""Each of four micro-batches is clipped by itself, where their sum is to be clipped (accelerate#641)."""

import torch
from common import Decoder, next_token_loss, run, start, train_in_micro_batches
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

MICRO_BATCHES = 4


def main(faulty: bool) -> None:
    start()
    model = DistributedDataParallel(Decoder())

    def backward(i: int, tokens: Tensor) -> Tensor:
        last = i == MICRO_BATCHES - 1
        model.require_backward_grad_sync = last
        loss = next_token_loss(model(tokens), tokens) / MICRO_BATCHES
        loss.backward()
        if last or faulty:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        return loss

    train_in_micro_batches(model, MICRO_BATCHES, backward)


run(main)
