"""Gradient sync stays off at the last micro-batch, so the optimizer's step has no gradients."""

from common import BF16, Decoder, next_token_loss, run, sharded, start, train_in_micro_batches
from torch import Tensor

MICRO_BATCHES = 2


def main(faulty: bool) -> None:
    start()
    model = sharded(Decoder(), mp_policy=BF16)
    last = MICRO_BATCHES if faulty else MICRO_BATCHES - 1

    def backward(i: int, tokens: Tensor) -> Tensor:
        model.set_requires_gradient_sync(i == last)
        loss = next_token_loss(model(tokens), tokens) / MICRO_BATCHES
        loss.backward()
        return loss

    train_in_micro_batches(model, MICRO_BATCHES, backward, limit=1.0)


run(main)
