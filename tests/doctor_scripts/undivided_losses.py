"""Four micro-batches' losses are summed up, where the batch's loss is their mean (verl#3332)."""

from common import Decoder, next_token_loss, run, sharded, start, train_in_micro_batches
from torch import Tensor

MICRO_BATCHES = 4


def main(faulty: bool) -> None:
    start()
    model = sharded(Decoder())

    def backward(i: int, tokens: Tensor) -> Tensor:
        model.set_requires_gradient_sync(i == MICRO_BATCHES - 1)
        loss = next_token_loss(model(tokens), tokens)
        (loss if faulty else loss / MICRO_BATCHES).backward()
        return loss / MICRO_BATCHES

    train_in_micro_batches(model, MICRO_BATCHES, backward, limit=100.0)


run(main)
