"""A reader's function on all ranks: no rank is left in a collective, and the process group stays usable."""

import time
from contextlib import suppress

import pytest
import torch
import torch.distributed as dist

from fsdp_utils.lessons.together import run_together


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


def returns_on_rank_0() -> int | None:
    return 1 if dist.get_rank() == 0 else None


def raises_on_rank_1() -> torch.Tensor:
    if dist.get_rank() == 1:
        raise ValueError("no such\nthing")
    return all_reduce()


FUNCTIONS = {
    f.__name__: f
    for f in (
        all_reduce,
        on_rank_0_only,
        two_kinds,
        two_sizes,
        swallows,
        returns_on_rank_0,
        raises_on_rank_1,
    )
}
WAITS = "A rank would wait for ever: all_reduce of 8 bytes on rank 0, and no such call on rank 1."


def told(name: str) -> tuple[str, float, float]:
    began, found = time.monotonic(), ""
    try:
        _, found = run_together(FUNCTIONS[name])
    except ValueError as error:
        found = f"raised {error}"
    return found, all_reduce().sum().item(), time.monotonic() - began


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("all_reduce", ""),
        ("on_rank_0_only", WAITS),
        ("swallows", WAITS),
        (
            "two_kinds",
            "The ranks call different collectives: all_reduce of 8 bytes on rank 0; broadcast of 8 bytes on "
            "rank 1. Each would wait for the others.",
        ),
        ("two_sizes", "The ranks call different collectives: all_reduce of 4 bytes on rank 0; all_reduce of"),
        ("returns_on_rank_0", "The function returns None on rank 1, and something on the others."),
    ],
)
def test_ranks_that_part_are_told_at_once_and_the_group_stays(two_ranks, name: str, sentence: str) -> None:
    for found, total, seconds in two_ranks(told, name):
        assert found.startswith(sentence)
        assert bool(found) == bool(sentence)
        assert total == 4
        assert seconds < 5


def test_an_error_is_raised_where_it_occurred_and_told_to_the_others(two_ranks) -> None:
    (first, total, _), (second, _, _) = two_ranks(told, "raises_on_rank_1")
    assert first == "Rank 1 raised ValueError: no such."
    assert second == "raised no such\nthing"
    assert total == 4
