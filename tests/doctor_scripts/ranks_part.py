"""Rank 0 alone averages the loss for its log, a collective that the other rank does not call.

pytorch#77562 is of this kind.
"""

import torch.distributed as dist
from common import BF16, Decoder, run, sharded, start, train
from torch import Tensor


def main(faulty: bool) -> None:
    rank, world = start(seconds=8)

    def log(step: int, loss: Tensor) -> None:
        mean = loss.detach()
        if not faulty:
            dist.all_reduce(mean)
        if rank == 0:
            if faulty:
                dist.all_reduce(mean)
            print(f"step {step}: loss {mean.item() / world:.4f}", flush=True)

    train(sharded(Decoder(), mp_policy=BF16), after_step=log)


run(main)
