"""All ranks draw from one seed, so each trains on the same samples and a second rank adds nothing."""

import torch
from common import BF16, Decoder, counting, run, sharded, start, train


def main(faulty: bool) -> None:
    rank, _ = start()
    data = counting(256)
    generator = torch.Generator().manual_seed(17 if faulty else 17 + rank)
    drawn = (data[torch.randint(len(data), (4,), generator=generator)] for _ in range(6))
    train(sharded(Decoder(), mp_policy=BF16), batches=drawn)


run(main)
