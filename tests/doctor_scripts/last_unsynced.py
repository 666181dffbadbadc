"""DDP is told to reduce the last of four micro-batches after its forward (build-nanogpt#30)."""

from common import Decoder, next_token_loss, run, start, train_in_micro_batches
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

MICRO_BATCHES = 4


def main(faulty: bool) -> None:
    start()
    model = DistributedDataParallel(Decoder())

    def backward(i: int, tokens: Tensor) -> Tensor:
        if not faulty:
            model.require_backward_grad_sync = i == MICRO_BATCHES - 1
        loss = next_token_loss(model(tokens), tokens) / MICRO_BATCHES
        if faulty:
            model.require_backward_grad_sync = i == MICRO_BATCHES - 1
        loss.backward()
        return loss

    train_in_micro_batches(model, MICRO_BATCHES, backward)


run(main)
