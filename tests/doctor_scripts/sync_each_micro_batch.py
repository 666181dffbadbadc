"""DDP reduces gradients at each of four micro-batches, where once per step is enough."""

import contextlib

from common import Decoder, next_token_loss, run, start, train_in_micro_batches
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

MICRO_BATCHES = 4


def main(faulty: bool) -> None:
    start()
    model = DistributedDataParallel(Decoder())

    def backward(i: int, tokens: Tensor) -> Tensor:
        with contextlib.nullcontext() if faulty or i == MICRO_BATCHES - 1 else model.no_sync():
            loss = next_token_loss(model(tokens), tokens)
            (loss / MICRO_BATCHES).backward()
        return loss / MICRO_BATCHES

    train_in_micro_batches(model, MICRO_BATCHES, backward, limit=1.0)


run(main)
