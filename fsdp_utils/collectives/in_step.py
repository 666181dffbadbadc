"""check_in_step: say at which collective, and on which line of the program, the ranks part."""

from __future__ import annotations

import json
import math
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch.distributed as dist

from fsdp_utils.collectives.c10d_hooks import Call, listen_to_calls
from fsdp_utils.collectives.call_site import find_line, place_in_words, signature
from fsdp_utils.collectives.calls_of_ranks import CallsOfRanks, Finding
from fsdp_utils.distributed.agreement import has_peers, library_store

POLL_S = 0.5  # how often a rank publishes its new calls, and rank 0 compares those of all ranks
ANSWER_S = 3.0  # for the ranks to hear of the comparison when one leaves the block
MOST_SITES = 4096  # that a rank remembers: more only where shapes differ in each step
_POINT_TO_POINT = {"send", "recv"}  # paired between two ranks, not by order within the group


class OutOfStep(RuntimeError):
    """The ranks have called different collectives. The message says at which one they part, and where.

    Example::

        try:
            with check_in_step():
                train_step(batch)
        except OutOfStep as error:
            print(error)
            # the ranks part at collective 1 of all ranks.
            #   rank 0: all_reduce of float32[8] by SUM, at train.py:4 `dist.all_reduce(x, op)`
            #   rank 1: all_reduce of float32[8] by MAX, at train.py:4 `dist.all_reduce(x, op)`
    """


class InStep:
    """The result of `check_in_step`."""

    report: str = ""  # where the ranks part, or which rank a collective waits for; "" while they are in step


@contextmanager
def check_in_step(*, after_s: float = 10.0, by_line: bool = True) -> Iterator[InStep]:
    """Watch that all ranks call the same collectives in the same order; say on which line they part.

    Put it around the training loop, on all ranks. A thread on each rank publishes the rank's new calls twice
    a second in the process group's store, and rank 0 compares them, in their order within a process group.
    Nothing is sent with the training's own collectives.

    The ranks part where the kind, the dtype, the shape (without dimensions of size 1), the reduce operation,
    the root or FSDP2's unit of a call differs, where an all_to_all gives a rank another number of elements
    than it takes, where equal calls come from different lines, or where a rank leaves the block while others
    wait in a collective for it. Rank 0 then prints a report to stderr within about two seconds, and each rank
    raises it at its next collective or at the end of the block, or when the collective that it waits in ends:
    at the latest at the time-out of its process group.

    A rank that computes for long while others wait for it looks like a hang, and may be none. Rank 0 reports
    such a wait once, after `after_s`, and nothing is raised.

    Not watched: send, recv and what is built of them (batch_isend_irecv, pipelines); monitored_barrier;
    collectives of threads that the program starts, such as those of an asynchronous save; and the values of
    tensors. Lines are not compared of broadcast, reduce, gather, scatter and gather_object. Where more bytes
    arrive than a rank expects, gloo ends its process before the ranks are compared.

    Args:
        after_s: seconds that a collective may wait for a rank until the wait is reported; also the longest
            that a rank waits at the end of the block for the others to arrive there.
        by_line: whether equal calls from different lines count as parting; False for programs in which they
            are right, such as DDP's `join`.

    Returns:
        A context manager that gives an `InStep`. Without a process group, and on one rank, it does nothing.

    Raises:
        OutOfStep: the ranks have parted.
        ValueError: after_s is not above 0.

    Example::

        with check_in_step() as watch:
            for batch in loader:
                train_step(batch)
        print(watch.report or "in step")  # in step
    """
    if not 0 < after_s < math.inf:  # false for nan, too
        raise ValueError(f"check_in_step: expected after_s above 0 and finite, found {after_s}")
    if not has_peers() or dist.get_world_size() == 1:
        yield InStep()
        return
    watch = _Watch(after_s, by_line)
    watch.start()
    try:
        with listen_to_calls(watch.collective):
            yield watch.found
        watch.leave("has left the block", wait_s=after_s + ANSWER_S)
    except OutOfStep:
        watch.leave("raised OutOfStep", wait_s=0)
        raise
    except BaseException as error:
        watch.leave(f"left the block by {type(error).__name__}", wait_s=ANSWER_S)
        # An error of a rank that others wait for is its own; others are likely to follow from the parting.
        if watch.parted and isinstance(error, RuntimeError) and not watch.has_gone:
            raise OutOfStep(watch.found.report) from error
        if watch.found.report and hasattr(error, "add_note"):  # from Python 3.11 on
            error.add_note(watch.found.report)  # pyright: ignore[reportAttributeAccessIssue]
        raise
    if watch.parted:
        raise OutOfStep(watch.found.report)


class _Watch(threading.Thread):
    """Records this rank's calls, publishes them and, on rank 0, compares those of all ranks."""

    def __init__(self, after_s: float, by_line: bool) -> None:
        super().__init__(name="check_in_step", daemon=True)
        self.found = InStep()
        self.parted = False
        self.has_gone = False  # whether the others wait for this rank, which has left
        self._after_s, self._by_line = after_s, by_line
        self._rank, self._world_size = dist.get_rank(), dist.get_world_size()
        number = library_store("in_step").add(f"blocks/{self._rank}", 1)  # the call count on this rank
        self._store = _own_connection(f"in_step/{number}")
        self._main = threading.get_ident()
        self._numbers: dict[Any, int] = {}  # by the way in which this rank calls
        self._calls: deque[tuple[Any, ...]] = deque()  # that are not published yet
        self._messages = 0  # that are published
        self._left = ""  # how this rank has left the block
        self._is_over = False  # whether the program waits no longer
        self._wake = threading.Event()
        # on rank 0
        self._all = CallsOfRanks(self._world_size)
        self._read = [0] * self._world_size  # messages of each rank
        self._waited = False  # a wait has been reported

    # in the threads of the program

    def collective(self, call: Call, issue: Callable[[], Any]) -> Any:
        """Record a call, then issue it."""
        # the program's thread, or one of torch, such as backward's on a GPU
        is_main = threading.get_ident() == self._main or threading.current_thread().name.startswith("Dummy-")
        if call.kind in _POINT_TO_POINT or not is_main:
            return issue()
        if self.parted:
            raise OutOfStep(self.found.report)
        if not self.is_alive():  # nothing is compared any more
            return issue()
        what = signature(call, sys._getframe(1))
        number, new = self._numbers.get(what), ()
        if number is None:
            if len(self._numbers) == MOST_SITES:
                self._numbers.clear()
            self._numbers[what] = number = len(self._numbers)
            new = (what.site(dist.get_process_group_ranks(call.group), by_line=self._by_line),)
        self._calls.append((number, *new))
        return issue()

    def leave(self, how: str, *, wait_s: float) -> None:
        """Wait at most so long for the end of the comparison, as the program leaves the block."""
        self._left = how
        self._wake.set()
        self.join(wait_s)
        self._is_over = True
        self._wake.set()
        self.join(ANSWER_S + 2 * POLL_S)

    # in the thread of the watch

    def run(self) -> None:
        with suppress(RuntimeError):  # the store is gone, and its rank with it
            while not self._look():
                self._wake.wait(POLL_S / 10 if self._left else POLL_S)
                self._wake.clear()
        self._calls.clear()

    def _look(self) -> bool:
        """Publish and compare what is new; is there nothing more to compare?"""
        is_over = self._is_over
        self._publish()
        if self._rank == 0:
            self._compare(is_over)
        is_end = self._store.check(["end"])  # first: it comes after the last finding
        if not self.parted and self._store.check(["finding"]):
            finding = Finding(**json.loads(self._store.get("finding")))
            self.found.report, self.has_gone = finding.text, self._rank in finding.gone
            self.parted = finding.parted
        return is_over or is_end or (self.parted and bool(self._left))

    def _publish(self) -> None:
        """Publish new calls, and where the program stands."""
        left = self._left  # first: all calls before it are recorded
        calls = [self._calls.popleft() for _ in range(len(self._calls))]
        code, line, _ = find_line(sys._current_frames().get(self._main))
        message = {
            "left": left,
            "stands": place_in_words(code, line) if code else "outside of the program",
            "calls": calls,
        }
        self._store.set(f"{self._rank}/{self._messages}", json.dumps(message))
        self._messages += 1

    def _compare(self, is_over: bool) -> None:
        for rank in range(self._world_size):
            while self._store.check([key := f"{rank}/{self._read[rank]}"]):
                self._all.hear(rank, json.loads(self._store.get(key)))
                self._store.delete_key(key)
                self._read[rank] += 1
        finding = Finding("") if self.parted else self._all.find()
        is_still = not self._waited and time.monotonic() - self._all.changed > self._after_s
        if finding.parted or (finding.text and is_still):
            self._waited = True
            self._store.set("finding", json.dumps(finding._asdict()))
            print(f"check_in_step: {finding.text}", file=sys.stderr, flush=True)
        if is_over or all(self._all.left.values()):
            self._store.set("end", "")


def _own_connection(part: str) -> dist.Store:
    """Open the library's store over another connection: the program may block the default one."""
    store = library_store(part)
    try:
        return store.clone()  # pyright: ignore[reportAttributeAccessIssue]
    except (AttributeError, RuntimeError):  # FileStore and HashStore open their file, or a lock, each time
        return store
