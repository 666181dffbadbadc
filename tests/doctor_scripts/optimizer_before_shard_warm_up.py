"""A forward leaves the root gathered, and the optimizer gets what is gathered (pytorch#149205)."""

import torch
from common import Decoder, counting, run, sharded, start, train


def main(faulty: bool) -> None:
    start()
    model = sharded(Decoder())
    with torch.no_grad():
        model(counting(4))
    if not faulty:
        model.reshard()
    train(model, limit=0.1)


run(main)
