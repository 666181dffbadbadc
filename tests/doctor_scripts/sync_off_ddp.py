"""DDP inside a plain module: all micro-batches run under no_sync(), the last one too."""

import contextlib

import torch
from common import Decoder, counting, next_token_loss, run, say, start
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
    rank, _ = start()
    network = DDP(Decoder(blocks=2))
    model = Trained(network)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for step, samples in enumerate(counting(64, seed=rank).split(4 * MICRO_BATCHES)):
        total = torch.zeros(())
        for i, tokens in enumerate(samples.chunk(MICRO_BATCHES)):
            is_last = i == MICRO_BATCHES - 1
            with contextlib.nullcontext() if is_last and not faulty else network.no_sync():
                loss = model(tokens) / MICRO_BATCHES
                loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        say(step, total)


if __name__ == "__main__":
    run(main)
