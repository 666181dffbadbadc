"""Ranks that agree: who is missing, who differs, who has failed or ended, in words and within the limit."""

import time
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist

from fsdp_utils import run_on_ranks
from fsdp_utils.distributed import agreement
from fsdp_utils.distributed.agreement import Ranks, agree, by_ranks, library_store, rank_names
from fsdp_utils.torch_internals.groups import process_groups

TwoRanks = Callable[..., list[Any]]


class RoomError(RuntimeError):
    pass


def entered(facts: Callable[[], dict[str, Any]] = dict, **options: Any) -> Ranks | str:
    """The ranks, or the error's text."""
    try:
        return agree("enter", facts, error=RoomError, topic="test", **options)
    except RoomError as error:
        return str(error)


def rank() -> int:
    return dist.get_rank()


def test_ranks_exchange_results_and_the_first_failure_is_the_error_of_all(two_ranks: TwoRanks) -> None:
    def fn() -> list[Any]:
        ranks = agree("enter", lambda: {"same": 1, "_own": rank()}, error=RoomError, topic="test")
        found: list[Any] = [[facts["_own"] for facts in ranks.facts]]
        found.append(ranks.all(lambda: 10 * rank()))
        found.append(ranks.first(lambda: f"from {rank()}"))
        found.append(ranks.numbers(rank() + 5))
        for call in (ranks.all, ranks.each):
            with pytest.raises(RoomError, match=r"^enter: rank 1: ZeroDivisionError: integer .* by zero$"):
                call(lambda: 1 // (1 - rank()))
        found.append(ranks.each(lambda: rank()))
        ranks.close()
        return found

    first, second = two_ranks(fn)
    assert first[:4] == second[:4] == [[0, 1], [0, 10], "from 0", [5, 6]]
    assert (first[4], second[4]) == (0, 1)


def test_facts_that_differ_are_named(two_ranks: TwoRanks) -> None:
    for text in two_ranks(lambda: entered(lambda: {"step": rank()})):
        assert text.startswith("enter: expected the same step on all ranks, found rank 0: 0; rank 1: 1")


def test_the_group_lasts_from_call_to_call_until_it_is_closed(two_ranks: TwoRanks) -> None:
    def fn() -> list[Any]:
        first, second = entered(), entered()
        assert isinstance(first, Ranks)
        assert isinstance(second, Ranks)
        counts = [first.group is second.group, len(process_groups())]
        second.close()
        return [*counts, len(process_groups())]

    assert two_ranks(fn) == [[True, 2, 1]] * 2


class SlowStore:
    """A store that takes its time to write, as one on another host does."""

    def __init__(self, part: str) -> None:
        self._store = library_store(part)

    def set(self, key: str, value: str) -> None:
        time.sleep(0.2)
        self._store.set(key, value)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


def test_however_short_the_wait_an_absent_rank_is_named() -> None:
    def fn() -> str | None:
        with patch.object(agreement, "library_store", SlowStore):
            found = entered(wait_s=1e-3) if rank() < 2 else None  # both wait in vain, and one decides
        dist.barrier()
        assert not isinstance(found, Ranks)
        return found

    for text in run_on_ranks(fn, world_size=3, timeout=40)[:2]:
        assert text.startswith("enter: expected all 3 ranks to enter it, found only rank"), text
        assert "after 0.001 s; missing: rank" in text


def test_with_a_short_wait_ranks_that_come_in_time_connect(two_ranks: TwoRanks) -> None:
    def fn() -> bool:
        dist.barrier()
        return isinstance(entered(wait_s=0.05), Ranks)

    assert two_ranks(fn) == [True, True]


def test_no_rank_goes_on_before_all_are_connected(two_ranks: TwoRanks) -> None:
    """One that closed its group at once would cut off those that still connect."""

    def fn() -> bool:
        store, connect = library_store("test_connected"), dist.new_group

        def connect_slowly(**options: Any) -> Any:
            made = connect(**options)
            if rank() == 1:
                time.sleep(0.3)
                store.set("rank 1", "connected")
            return made

        with patch.object(dist, "new_group", connect_slowly):
            ranks = entered()
        assert isinstance(ranks, Ranks)
        connected = store.check(["rank 1"])
        ranks.close()
        return connected

    assert two_ranks(fn) == [True, True]


def test_a_rank_that_leaves_is_noticed_at_once(two_ranks: TwoRanks) -> None:
    def fn() -> tuple[str, float]:
        ranks = agree("enter", dict, error=RoomError, topic="test", wait_s=60)
        if rank() == 1:
            ranks.close()  # as its death would: the connections close
            dist.barrier()
            return "", 0.0
        begun = time.monotonic()
        with pytest.raises(RoomError) as caught, ranks.guard():
            ranks.all(lambda: None)
        seconds = time.monotonic() - begun
        dist.barrier()
        return str(caught.value), seconds

    text, seconds = two_ranks(fn)[0]
    assert text.startswith("enter: rank 0 heard nothing from another rank within 60 s, or that rank is gone")
    assert seconds < 5


def test_a_process_on_its_own_agrees_with_itself() -> None:
    ranks = entered(lambda: {"_own": 3})
    assert isinstance(ranks, Ranks)
    assert (ranks.world_size, ranks.facts[0]["_own"], ranks.all(lambda: 4)) == (1, 3, [4])
    assert entered(lambda: {"own": 1 // 0}) == "enter: ZeroDivisionError: integer division or modulo by zero"


def test_texts_are_told_once_with_the_ranks_that_they_are_from() -> None:
    assert by_ranks([["a", "b"], ["b"], ["a", "b"]]) == ["ranks 0, 2: a", "b"]
    assert rank_names(range(10)) == "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 2 more"
