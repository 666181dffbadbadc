"""DDP inside a plain module: all micro-batches run under no_sync(), the last one too."""

import contextlib

from common import Decoder, next_token_loss, run, start, train_in_micro_batches
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

MICRO_BATCHES = 2


class Trained(nn.Module):
    """What a training loop of one's own often holds: the network and its loss."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, tokens: Tensor) -> Tensor:
        return next_token_loss(self.network(tokens), tokens)


def main(faulty: bool) -> None:
    start()
    network = DDP(Decoder())
    model = Trained(network)

    def backward(i: int, tokens: Tensor) -> Tensor:
        is_last = i == MICRO_BATCHES - 1
        with contextlib.nullcontext() if is_last and not faulty else network.no_sync():
            loss = model(tokens) / MICRO_BATCHES
            loss.backward()
        return loss

    train_in_micro_batches(model, MICRO_BATCHES, backward, limit=1.0)


run(main)
