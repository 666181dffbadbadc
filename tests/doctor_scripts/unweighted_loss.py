"""Ranks average means of unequal numbers of labels: a label counts more where there are few.

See verl#5625, RL2#11.
"""

import torch
import torch.distributed as dist
from common import BF16, IGNORED, LENGTH, Decoder, counting, next_token_loss, run, sharded, start, train
from torch import Tensor


def padded(samples: int, rank: int) -> tuple[Tensor, Tensor]:
    """Tokens and labels of sequences of 4 to all tokens, those of one rank longer than those of the other."""
    tokens = counting(samples, seed=rank)
    generator = torch.Generator().manual_seed(rank)
    lengths = torch.randint(*((4, 8) if rank else (10, LENGTH + 1)), (samples, 1), generator=generator)
    padding = torch.arange(LENGTH) >= lengths
    return tokens.masked_fill(padding, 0), tokens.masked_fill(padding, IGNORED)


def main(faulty: bool) -> None:
    rank, world = start()
    model = sharded(Decoder(), mp_policy=BF16)
    inputs, targets = padded(32, rank)

    def loss_of(batch: tuple[Tensor, Tensor]) -> Tensor:
        tokens, labels = batch
        logits = model(tokens)
        if faulty:
            return next_token_loss(logits, labels)
        count = (labels[:, 1:] != IGNORED).sum()
        dist.all_reduce(count)
        return next_token_loss(logits, labels, reduction="sum") * world / count  # FSDP divides by world

    train(model, batches=zip(inputs.split(4), targets.split(4), strict=True), loss_of=loss_of, limit=1.0)


run(main)
