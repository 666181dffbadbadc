"""Ranks that agree: who is missing, who differs, who has failed or ended, in words and within the limit."""

import os
import re
import socket
import struct
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from fsdp_utils import run_on_ranks
from fsdp_utils.distributed import agree

TwoRanks = Callable[..., list[Any]]


class RoomError(RuntimeError):
    pass


class NoSuchRoomError(RoomError):
    pass


def rank() -> int:
    return dist.get_rank()


def enter(facts: Callable[[], dict[str, Any]] = dict, **options: Any) -> Any:
    return agree("enter", facts, error=RoomError, topic="test", **options)


def told(call: Callable[[], Any]) -> tuple[str, str]:
    """The class and the text of the error."""
    try:
        call()
    except RoomError as error:
        return type(error).__name__, str(error)
    return "", ""


def fails_on_1(error: Exception) -> Callable[[], None]:
    def fn() -> None:
        if rank() == 1:
            raise error

    return fn


def test_a_failure_on_one_rank_is_the_same_error_on_all_and_they_go_on(two_ranks: TwoRanks) -> None:
    def fn() -> list[tuple[str, str]]:
        ranks = enter()
        found = [
            told(lambda: ranks.all(fails_on_1(ValueError("no")))),
            told(lambda: ranks.each(fails_on_1(ValueError("no")))),
            told(lambda: ranks.each(fails_on_1(NoSuchRoomError("gone")))),
            told(lambda: ranks.first(lambda: 1 // 0)),
        ]
        ranks.consequence = ". Mind the step."
        found.append(told(lambda: ranks.all(lambda: 1 // 0)))
        results = (
            ranks.all(lambda: 10 * rank()),
            ranks.first(lambda: f"from {rank()}"),
            ranks.each(rank) == rank(),
        )
        found.append(("", str(results)))
        name = ["save", "load"][rank()]
        return [*found, told(lambda: agree(name, dict, error=RoomError, topic="test"))]

    first, second = two_ranks(fn)
    zero = "ZeroDivisionError: integer division or modulo by zero"
    assert first == second
    assert first == [
        *[("RoomError", "enter: rank 1: ValueError: no")] * 2,
        ("NoSuchRoomError", "enter: rank 1: gone"),
        ("RoomError", f"enter: rank 0: {zero}"),
        ("RoomError", f"enter: {zero}. Mind the step."),
        ("", "([0, 10], 'from 0', True)"),
        (
            "RoomError",
            'expected the same call on all ranks, found rank 0: "save"; rank 1: "load". Decide on one rank '
            "and broadcast the decision.",
        ),
    ]


FACTS: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "value": (lambda: {"step": rank()}, "expected the same step on all ranks, found rank 0: 0; rank 1: 1"),
    "key": (lambda: {str(rank()): 1}, "expected the same 0 on all ranks, found rank 0: 1; rank 1: absent"),
    "failure": (
        lambda: {"step": 1 // rank()},
        "rank 0: ZeroDivisionError: integer division or modulo by zero",
    ),
    "no JSON": (lambda: {"step": {1}}, "TypeError: Object of type set is not JSON serializable"),
}


def test_facts_that_differ_or_fail_are_named_on_all_ranks(two_ranks: TwoRanks) -> None:
    found = two_ranks(lambda: [told(partial(enter, facts)) for facts, _ in FACTS.values()])
    assert found[0] == found[1]
    for (kind, text), (_, expected) in zip(found[0], FACTS.values(), strict=True):
        assert kind == "RoomError"
        assert text.startswith(f"enter: {expected}")


def test_entries_that_differ_are_named_with_the_ranks_of_each_value() -> None:
    def fn() -> list[tuple[str, str]]:
        ranks = enter()
        common = {f"entry {number}": "equal" for number in range(1000)}
        found = [told(lambda: ranks.same("state", common | {"a": str(rank() % 2)}))]
        own = {f"{rank()} {number}": "x" * 1000 for number in range(5)}
        found.append(told(lambda: ranks.same("state", common | own, cure=". Mend it.")))
        return [*found, told(lambda: ranks.same("state", common))]

    found = run_on_ranks(fn, world_size=3)
    assert found[0] == found[1] == found[2]
    (_, values), (_, names), equal = found[0]
    assert values == "enter: expected the same state a on all ranks, found ranks 0, 2: 0; rank 1: 1"
    lines = names.splitlines()
    for number, line in enumerate(lines):
        begin, _, end = line.removeprefix("enter: ").partition("x" * 200)
        assert begin == f"expected the same state 0 {number} on all ranks, found rank 0: "
        assert end.removesuffix(". Mend it.").endswith("; ranks 1, 2: absent")
    assert len(lines) == 3
    assert lines[-1].endswith(". Mend it.")
    assert equal == ("", "")


def test_however_short_the_wait_absent_ranks_are_named_and_all_find_together_again() -> None:
    def fn() -> tuple[tuple[str, str], list[int]]:
        alone = told(lambda: enter(wait_s=1e-3)) if rank() < 2 else ("", "")
        dist.barrier()
        return alone, enter(wait_s=20).all(rank)

    (first, again), (second, _), _ = run_on_ranks(fn, world_size=3, timeout=40)
    for _, text in (first, second):
        assert text.startswith("enter: expected all 3 ranks to enter it, found only rank"), text
        assert "after 0.001 s; missing: rank" in text
    assert again == [0, 1, 2]


BYTES_ACKED = 120  # offset in Linux's struct tcp_info


def bytes_sent() -> int:
    """The bytes that this process has sent over the TCP connections that it has now."""
    total = 0
    for path in Path("/proc/self/fd").iterdir():
        if not path.is_socket():
            continue
        with socket.socket(fileno=os.dup(int(path.name))) as found:
            if found.type == socket.SOCK_STREAM and found.family in (socket.AF_INET, socket.AF_INET6):
                info = found.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 240)
                total += struct.unpack_from("Q", info, BYTES_ACKED)[0]
    return total


def traffic() -> int:
    """The bytes that this rank sends for one entry and four of each exchange; rank 0 hosts the store."""
    world_size, mine, master = dist.get_world_size(), rank(), rank() == 0
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if master else None
    port = [server.port if server else 0]
    dist.broadcast_object_list(port)
    dist.destroy_process_group()
    store = server or dist.TCPStore("127.0.0.1", port[0], is_master=False)
    dist.init_process_group("gloo", store=store, rank=mine, world_size=world_size)
    enter()  # makes the group: torch's own traffic
    dist.barrier()
    before = bytes_sent()
    ranks = enter(lambda: {"configuration": "x" * 10_000})
    for _ in range(4):
        ranks.each(lambda: "x" * 10_000)
        ranks.same("entries", {str(number): "x" * 1000 for number in range(100)})
        ranks.first(lambda: "checkpoints/000003-step-3")
    return bytes_sent() - before


@pytest.mark.skipif(sys.platform != "linux", reason="reads Linux's TCP statistics")
def test_traffic_grows_with_the_number_of_ranks_and_not_with_its_square() -> None:
    few, many = (run_on_ranks(traffic, world_size=size)[0] for size in (3, 8))
    assert many < 1.5 * few * 7 / 2  # the square would be 2 times that
    assert many / 7 * 1023 < 20e6  # at 1,024 ranks


def test_a_rank_that_leaves_is_noticed_at_once(two_ranks: TwoRanks) -> None:
    def notice(exchange: str) -> tuple[str, float]:
        ranks = enter(wait_s=60)
        if rank() == 1:
            ranks.close()
            dist.barrier()
            return "", 0.0

        def body() -> None:
            arguments = ("state", {}) if exchange == "same" else (rank,)
            with ranks.guard():
                getattr(ranks, exchange)(*arguments)
                ranks.each(rank)  # rank 0 waits for nobody in `first`

        begun = time.monotonic()
        _, text = told(body)
        seconds = time.monotonic() - begun
        dist.barrier()
        return text, seconds

    for text, seconds in two_ranks(lambda: list(map(notice, ("all", "each", "first", "same"))))[0]:
        pattern = r"enter: rank 0 heard nothing from another rank for \d\.\d s: it is late or gone \("
        assert re.match(pattern, text)
        assert seconds < 5


def test_a_process_on_its_own_agrees_with_itself() -> None:
    ranks = enter(lambda: {"step": 3})
    ranks.same("entries", {"a": "1"})
    assert (ranks.world_size, ranks.all(lambda: 4)) == (1, [4])
    assert (ranks.each(lambda: 5), ranks.first(lambda: 6)) == (5, 6)
    zero = "enter: ZeroDivisionError: integer division or modulo by zero"
    assert told(lambda: enter(lambda: {"own": 1 // 0})) == ("RoomError", zero)


def test_what_fails_inside_the_guard_is_the_error_of_all_whoever_else_knows_the_group(
    two_ranks: TwoRanks,
) -> None:
    def body() -> None:
        earlier, ranks = enter(wait_s=60), enter(wait_s=60)
        with ranks.guard():
            fails_on_1(MemoryError("too large"))()
            ranks.all(rank)
        earlier.close()

    def fn() -> tuple[tuple[str, str], float]:
        begun = time.monotonic()
        return told(body), time.monotonic() - begun

    expected = "enter: rank 1 failed, or lost a rank that did: MemoryError: too large"
    for error, seconds in two_ranks(fn):
        assert error == ("RoomError", expected)
        assert seconds < 5
