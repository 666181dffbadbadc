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
from tests.on_ranks import Together

on_two, on_three = Together(2), Together(3)


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


ZERO = "ZeroDivisionError: integer division or modulo by zero"


@on_two
def test_a_failure_on_one_rank_is_the_same_error_on_all_and_they_go_on() -> None:
    ranks = enter()
    for call in (ranks.all, ranks.each):
        said = told(partial(call, fails_on_1(ValueError("no"))))
        assert said == ("RoomError", "enter: rank 1: ValueError: no")
    gone = told(lambda: ranks.each(fails_on_1(NoSuchRoomError("gone"))))
    assert gone == ("NoSuchRoomError", "enter: rank 1: gone")
    assert told(lambda: ranks.first(lambda: 1 // 0)) == ("RoomError", f"enter: rank 0: {ZERO}")
    ranks.consequence = ". Mind the step."
    assert told(lambda: ranks.all(lambda: 1 // 0)) == ("RoomError", f"enter: {ZERO}. Mind the step.")
    assert ranks.all(lambda: 10 * rank()) == [0, 10]
    assert ranks.first(lambda: f"from {rank()}") == "from 0"
    assert ranks.each(rank) == rank()
    other = told(lambda: agree(["save", "load"][rank()], dict, error=RoomError, topic="test"))
    assert other == (
        "RoomError",
        'expected the same call on all ranks, found rank 0: "save"; rank 1: "load". Decide on one rank and '
        "broadcast the decision.",
    )


FACTS: dict[str, Callable[[], dict[str, Any]]] = {
    "expected the same step on all ranks, found rank 0: 0; rank 1: 1": lambda: {"step": rank()},
    "expected the same 0 on all ranks, found rank 0: 1; rank 1: absent": lambda: {str(rank()): 1},
    f"rank 0: {ZERO}": lambda: {"step": 1 // rank()},
    "TypeError: Object of type set is not JSON serializable": lambda: {"step": {1}},
}


@on_two
def test_facts_that_differ_or_fail_are_named_on_all_ranks() -> None:
    for expected, facts in FACTS.items():
        kind, text = told(partial(enter, facts))
        assert kind == "RoomError"
        assert text.startswith(f"enter: {expected}")


@on_two
def test_a_rank_that_leaves_is_noticed_at_once() -> None:
    for exchange in ("all", "each", "first", "same"):
        ranks = enter(wait_s=60)
        if rank() == 1:
            ranks.close()
        else:
            begun = time.monotonic()
            _, text = told(partial(in_guard, ranks, exchange))
            seen = r"enter: rank 0 heard nothing from another rank for \d\.\d s: it is late or gone \("
            assert re.match(seen, text)
            assert time.monotonic() - begun < 5
        dist.barrier()


def in_guard(ranks: Any, exchange: str) -> None:
    with ranks.guard():
        getattr(ranks, exchange)(*(("state", {}) if exchange == "same" else (rank,)))
        ranks.each(rank)  # rank 0 waits for nobody in `first`


@on_two
def test_what_fails_inside_the_guard_is_the_error_of_all_whoever_else_knows_the_group() -> None:
    def body() -> None:
        earlier, ranks = enter(wait_s=60), enter(wait_s=60)
        with ranks.guard():
            fails_on_1(MemoryError("too large"))()
            ranks.all(rank)
        earlier.close()

    begun = time.monotonic()
    expected = "enter: rank 1 failed, or lost a rank that did: MemoryError: too large"
    assert told(body) == ("RoomError", expected)
    assert time.monotonic() - begun < 5


@on_three
def test_entries_that_differ_are_named_with_the_ranks_of_each_value() -> None:
    ranks = enter()
    common = {f"entry {number}": "equal" for number in range(1000)}
    _, values = told(lambda: ranks.same("state", common | {"a": str(rank() % 2)}))
    assert values == "enter: expected the same state a on all ranks, found ranks 0, 2: 0; rank 1: 1"
    own = {f"{rank()} {number}": "x" * 1000 for number in range(5)}
    _, names = told(lambda: ranks.same("state", common | own, cure=". Mend it."))
    lines = names.splitlines()
    for number, line in enumerate(lines):
        begin, _, end = line.removeprefix("enter: ").partition("x" * 200)
        assert begin == f"expected the same state 0 {number} on all ranks, found rank 0: "
        assert end.removesuffix(". Mend it.").endswith("; ranks 1, 2: absent")
    assert len(lines) == 3
    assert lines[-1].endswith(". Mend it.")
    ranks.same("state", common)


@on_three
def test_however_short_the_wait_absent_ranks_are_named_and_all_find_together_again() -> None:
    if rank() < 2:
        _, text = told(lambda: enter(wait_s=1e-3))
        assert text.startswith("enter: expected all 3 ranks to enter it, found only rank"), text
        assert "after 0.001 s; missing: rank" in text
    dist.barrier()
    assert enter(wait_s=20).all(rank) == [0, 1, 2]


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
    few, many = (run_on_ranks(traffic, world_size=size)[0] for size in (2, 5))
    assert many < 1.5 * few * 4  # the square would be 2.5 times that
    assert many / 4 * 1023 < 20e6  # at 1,024 ranks


def test_a_process_on_its_own_agrees_with_itself() -> None:
    ranks = enter(lambda: {"step": 3})
    ranks.same("entries", {"a": "1"})
    assert (ranks.world_size, ranks.all(lambda: 4)) == (1, [4])
    assert (ranks.each(lambda: 5), ranks.first(lambda: 6)) == (5, 6)
    assert told(lambda: enter(lambda: {"own": 1 // 0})) == ("RoomError", f"enter: {ZERO}")
