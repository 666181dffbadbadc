"""Gradients are reduced at each of four micro-batches, where once per step is enough (transformers#29425)."""

from common import Decoder, next_token_loss, run, sharded, start, train_in_micro_batches
from torch import Tensor

MICRO_BATCHES = 4


def main(faulty: bool) -> None:
    start()
    model = sharded(Decoder())

    def backward(i: int, tokens: Tensor) -> Tensor:
        if not faulty:
            model.set_requires_gradient_sync(i == MICRO_BATCHES - 1)
        loss = next_token_loss(model(tokens), tokens)
        (loss / MICRO_BATCHES).backward()
        return loss / MICRO_BATCHES

    train_in_micro_batches(model, MICRO_BATCHES, backward, limit=1.0)


run(main)
