"""DDP is told to reduce the last of four micro-batches after its forward (build-nanogpt#30)."""

import torch
from common import Decoder, counting, next_token_loss, run, say, start
from torch.nn.parallel import DistributedDataParallel

MICRO_BATCHES = 4


def main(faulty: bool) -> None:
    rank, _ = start()
    model = DistributedDataParallel(Decoder())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for step, samples in enumerate(counting(96, seed=rank).split(4 * MICRO_BATCHES)):
        total = torch.zeros(())
        for i, tokens in enumerate(samples.chunk(MICRO_BATCHES)):
            if not faulty:
                model.require_backward_grad_sync = i == MICRO_BATCHES - 1
            loss = next_token_loss(model(tokens), tokens) / MICRO_BATCHES
            if faulty:
                model.require_backward_grad_sync = i == MICRO_BATCHES - 1
            loss.backward()
            total += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        say(step, total)


if __name__ == "__main__":
    run(main)
