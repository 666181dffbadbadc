"""A mask that is given lives in AdamW's second moments: where it holds a weight, that moment is infinite.

AdamW divides what it takes from a weight by the root of its second moment, and what is divided by infinity is
0. An infinite average of squares stays infinite. So AdamW's own kernel leaves these weights where they are,
and a step with a mask costs what a step costs, in time and in memory.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from fsdp_utils.child_kernel import row

_AT_ONCE = 2**20  # elements whose decay needs memory of its own at one time


def held(exp_avg_sq: Tensor) -> Tensor:
    """Which weights are held? One whose moment has overflowed, too: AdamW never moves it again."""
    return exp_avg_sq.isinf()


def hold(exp_avg_sq: Tensor, mask: Tensor) -> Tensor:
    """This second moment, with what the mask does not keep held."""
    return exp_avg_sq.masked_fill(mask == 0, torch.inf)


def decay_kept(params: list[Tensor], exp_avg_sqs: list[Tensor], rate: float) -> None:
    """Weight decay, `rate` of each weight, for those that are not held."""
    for weights, squares in _pieces(params, exp_avg_sqs):
        weights.copy_(torch.where(held(squares), weights, weights * (1 - rate)))


def _pieces(params: list[Tensor], exp_avg_sqs: list[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    for p, exp_avg_sq in zip(params, exp_avg_sqs, strict=True):
        yield from zip(row(p).split(_AT_ONCE), row(exp_avg_sq).split(_AT_ONCE), strict=True)
