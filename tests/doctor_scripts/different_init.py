"""Each rank seeds its own random numbers before it builds the model: the shards are parts of two models."""

import torch
from common import Decoder, run, sharded, start, train


def main(faulty: bool) -> None:
    rank, _ = start()
    if faulty:
        torch.manual_seed(1000 + rank)
    model = sharded(Decoder())
    torch.manual_seed(1000 + rank)  # for dropout and the data
    train(model, limit=1.0)


run(main)
