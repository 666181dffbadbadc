"""A reader's function on all ranks: no rank is left in a collective, and the process group stays usable."""

import time
from contextlib import suppress

import torch
import torch.distributed as dist

from fsdp_utils.lessons.together import gather_scores, run_together
from tests.on_ranks import case, on_ranks


def all_reduce() -> torch.Tensor:
    one = torch.ones(2)
    dist.all_reduce(one)
    return one


def on_rank_0_only() -> int:
    if dist.get_rank() == 0:
        all_reduce()
    return 1


def two_kinds() -> torch.Tensor:
    if dist.get_rank() == 0:
        return all_reduce()
    dist.broadcast(one := torch.ones(2), src=0)
    return one


def two_sizes() -> int:
    dist.all_reduce(torch.ones(1 + dist.get_rank()))
    return 1


def swallows() -> int:
    for _ in range(3):
        with suppress(RuntimeError):
            on_rank_0_only()
    return 1


def all_gather_on_rank_0_before_the_scores() -> list[str]:
    if dist.get_rank() == 0:
        dist.all_gather_object([None, None], "of the answer")
    return gather_scores(f"of rank {dist.get_rank()}")


def returns_on_rank_0() -> int | None:
    return 1 if dist.get_rank() == 0 else None


def raises_on_rank_1() -> torch.Tensor:
    if dist.get_rank() == 1:
        raise ValueError("no such\nthing")
    return all_reduce()


WAITS = "A rank would wait for ever: all_reduce of 8 bytes on rank 0, and no such call on rank 1."
DIFFER = "The ranks call different collectives: all_reduce of "
TOLD = {  # by function: the sentence of each rank
    all_reduce: ("", ""),
    on_rank_0_only: (WAITS, WAITS),
    all_gather_on_rank_0_before_the_scores: (
        "A rank would wait for ever: all_gather of 16 bytes on rank 0, and no such call on rank 1.",
    )
    * 2,
    swallows: (WAITS, WAITS),
    two_kinds: (
        f"{DIFFER}8 bytes on rank 0; broadcast of 8 bytes on rank 1. Each would wait for the others.",
    )
    * 2,
    two_sizes: (
        f"{DIFFER}4 bytes on rank 0; all_reduce of 8 bytes on rank 1. Each would wait for the others.",
    )
    * 2,
    returns_on_rank_0: ("The function returns None on rank 1, and something on the others.",) * 2,
    raises_on_rank_1: ("Rank 1 raised ValueError: no such.", "raised no such\nthing"),
}


@on_ranks()
def test_ranks_that_part_are_told_at_once_and_the_group_stays() -> None:
    for function, told in TOLD.items():
        with case(function.__name__):
            began = time.monotonic()
            try:
                _, sentence = run_together(function)
            except ValueError as error:
                sentence = f"raised {error}"
            assert sentence == told[dist.get_rank()]
            assert all_reduce().sum().item() == 4
            assert time.monotonic() - began < 5


@on_ranks()
def test_scores_are_gathered_by_rank() -> None:
    assert run_together(lambda: gather_scores(10 * dist.get_rank())) == ([0, 10], "")
