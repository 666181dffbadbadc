"""check_in_step: say at which collective, and on which line of the program, the ranks part."""

from __future__ import annotations

import json
import math
import sys
import threading
import time
import weakref
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import CodeType
from typing import Any

import torch.distributed as dist

from fsdp_utils.collectives.c10d_hooks import Call, listen_to_calls
from fsdp_utils.collectives.parting import Finding, find_parting, have_parted
from fsdp_utils.collectives.program_line import GATHER_OBJECT, find_line, place_in_words
from fsdp_utils.collectives.signature import ROOTED, Signature, signature
from fsdp_utils.distributed.agreement import has_peers, library_store, wait_for
from fsdp_utils.distributed.rank_errors import keep_finding

POLL_S = 0.5  # how often a rank publishes where it is, and the first rank compares
ANSWER_S = 3.0  # for the ranks to publish their records once they are asked
LEFT = "has left the block"  # without an error
WINDOW = 4096  # calls that a rank remembers of each group
_RECENT, _EVERY = 48, 64  # hashes are published of so many last calls, and of every so-many-th before

# Paired one to one between two ranks, not by order within the group.
_POINT_TO_POINT = {"send", "recv"}


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
    """What `check_in_step` has found.

    Attributes:
        report: where the ranks part, or which rank a collective waits for; "" while they are in step.
    """

    report: str = ""


@contextmanager
def check_in_step(*, after_s: float = 10.0, by_line: bool = True) -> Iterator[InStep]:
    """Watch that all ranks call the same collectives in the same order; say on which line they part.

    Put it around the training loop, on all ranks. Collectives are paired by their order within a process
    group. A rank that calls another one than its peers gets an error, waits until the time-out of the group,
    or mixes up data silently. Here each rank records every call. Nothing is sent with the training's own
    collectives. Twice a second a thread on each rank publishes a hash of the record in the process group's
    store, and rank 0 compares the hashes.

    The ranks part where the kind, the dtype, the shape, the reduce operation, the root or FSDP2's unit of a
    call differs, where equal calls come from different lines, or where a rank leaves the block while others
    wait in a collective for it. This is found within about a second. Rank 0 then prints a report to stderr,
    and each rank raises it at its next collective, or at the end of the block. A rank that already waits
    inside a collective cannot be interrupted: it raises when its own wait ends, which is when a peer has
    gone or at the time-out of its process group. Where the time of `run_on_ranks` ends first, it raises the
    report.

    A rank that computes for long while others wait for it looks like a hang, and may be none. Rank 0 reports
    such a wait once, after `after_s`, and nothing is raised.

    Not watched: send, recv and what is built of them (batch_isend_irecv, pipelines), so a send without its
    recv is found only through the collectives that follow it; monitored_barrier; collectives of threads that
    the program starts, such as those of an asynchronous save; the sizes in an all_to_all; and the values of
    tensors. Lines are not compared of broadcast, reduce, gather and scatter, which one rank may call on a
    line of its own, nor of gather_object. Where more bytes arrive than a rank expects, gloo ends its process
    before the ranks are compared. Dimensions of size 1 do not count as part of a shape.

    Args:
        after_s: seconds that a collective may wait for a rank until the wait is reported; also the longest
            that a rank waits at the end of the block for the others to arrive there.
        by_line: whether equal calls from different lines count as parting. Set it to False for programs in
            which ranks call the same collective on different lines, such as DDP's `join`.

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
        watch.leave(LEFT, wait_s=after_s + ANSWER_S)
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
    finally:
        watch.stop()
    if watch.parted:
        raise OutOfStep(watch.found.report)


# ---- what is recorded of a call -------------------------------------------------------------------


class _Site:
    """One way to call a collective."""

    def __init__(self, what: Signature, unit: str | None, code: CodeType | None, line: int, by_line: bool):
        place = place_in_words(code, line)
        of_unit = "" if unit is None else f", for {unit or 'the root'}"  # of FSDP2, that the call works for
        rooted = what.kind in ROOTED or unit == GATHER_OBJECT
        self.agreed = f"{what.agreed()}|{unit}"  # what has to be the same on all ranks: the call ...
        self.place = place if by_line and not rooted else ""  # ... and its line
        self.words = f"{what.words()}{of_unit}, {place}"
        self.hashed = f"{self.agreed}|{self.place}".encode()


class _Calls:
    """The calls of one process group on this rank."""

    def __init__(self, ranks: Sequence[int]) -> None:
        self.ranks = list(ranks)
        self.known: dict[tuple[Any, ...], _Site] = {}
        self._count = 0
        self._chain = 0  # a hash of all calls until now
        self._window: deque[tuple[int, _Site, int]] = deque(maxlen=WINDOW)

    def add(self, site: _Site) -> None:
        self._count += 1
        self._chain = zlib.crc32(site.hashed, self._chain)
        self._window.append((self._count, site, self._chain))

    def hashes(self) -> dict[str, Any]:
        """What is published all the time; all of it as of one moment."""
        window = list(self._window)
        last = window[-1][0] if window else 0
        chains = {n: chain for n, _, chain in window if n > last - _RECENT or n % _EVERY == 0}
        return {"ranks": self.ranks, "count": last, "chains": chains}

    def record(self, sites: dict[_Site, int]) -> dict[str, Any]:
        """What is published where the ranks have parted. New sites are added to those given."""
        window = list(self._window)
        calls = [sites.setdefault(site, len(sites)) for _, site, _ in window]
        return {"ranks": self.ranks, "first": window[0][0] if window else 1, "calls": calls}


# ---- the watch ------------------------------------------------------------------------------------

_uses: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()  # blocks entered, by default group


class _Watch(threading.Thread):
    """Records this rank's calls, publishes their hashes and, on rank 0, compares those of all ranks."""

    def __init__(self, after_s: float, by_line: bool) -> None:
        super().__init__(name="check_in_step", daemon=True)
        self.found = InStep()
        self.parted = False
        self.has_gone = False  # whether the others wait for this rank, which has left
        self._after_s, self._by_line = after_s, by_line
        self._rank, self._ranks = dist.get_rank(), range(dist.get_world_size())
        world = dist.group.WORLD
        _uses[world] = number = _uses.get(world, 0) + 1
        self._store = _own_connection(f"in_step/{number}")
        self._main = threading.get_ident()
        self._groups: dict[str, _Calls] = {}
        self._last: _Site | None = None  # this rank's last call
        self._left = ""  # how this rank has left the block
        self._over, self._settled, self._wake = threading.Event(), threading.Event(), threading.Event()
        self._round = 0  # of records that were asked for
        self._waited = False  # a wait has been reported, on rank 0
        self._changed = time.monotonic()  # when the counts of the ranks changed last, on rank 0
        self._counts: Any = None

    # in the threads of the program

    def collective(self, call: Call, issue: Callable[[], Any]) -> Any:
        """Record a call, then issue it."""
        if call.kind in _POINT_TO_POINT or not self._is_main():
            return issue()
        if self.parted:
            raise OutOfStep(self.found.report)
        name = call.group.group_name
        calls = self._groups.get(name)
        if calls is None:
            calls = self._groups[name] = _Calls(dist.get_process_group_ranks(call.group))
        what = signature(call, calls.ranks)
        code, line, unit = find_line(sys._getframe(1))
        key = (what, unit, code, line)
        site = calls.known.get(key)
        if site is None:
            if len(calls.known) == WINDOW:  # such as of shapes that differ in each step
                calls.known.clear()
            site = calls.known[key] = _Site(what, unit, code, line, self._by_line)
        calls.add(site)
        self._last = site
        return issue()

    def _is_main(self) -> bool:
        """Is this the program's thread, or one of torch, such as backward's on a GPU?"""
        return threading.get_ident() == self._main or threading.current_thread().name.startswith("Dummy-")

    def leave(self, how: str, *, wait_s: float) -> None:
        """The program leaves the block: wait for the comparison, at most that long."""
        self._left = how
        self._wake.set()
        self._settled.wait(wait_s)

    def stop(self) -> None:
        self._over.set()
        self._wake.set()
        self.join(ANSWER_S + 2 * POLL_S)
        if self._rank == 0:
            keep_finding(None)  # this rank raises it, or the program goes on

    # in the thread of the watch

    def run(self) -> None:
        try:
            while not self._settled.is_set():
                is_over = self._over.is_set()
                self._publish()
                if self._rank == 0:
                    self._compare()
                self._read()
                if is_over:
                    return
                self._wake.wait(POLL_S / 10 if self._left else POLL_S)
                self._wake.clear()
        except RuntimeError:  # the store is gone, and its rank with it
            self._settled.set()

    def _publish(self) -> None:
        """Publish the hashes of this rank, and its records where rank 0 asks for them."""
        beat = {"left": self._left, "groups": {n: c.hashes() for n, c in dict(self._groups).items()}}
        self._store.set(f"beat/{self._rank}", json.dumps(beat))
        while self._store.check([f"wanted/{self._round}"]):
            sites: dict[_Site, int] = {}
            groups = {name: calls.record(sites) for name, calls in dict(self._groups).items()}
            last = self._last
            code, line, _ = find_line(sys._current_frames().get(self._main))
            record = {
                "left": self._left,
                "groups": groups,
                "sites": [(site.agreed, site.place, site.words) for site in sites],
                "stands": place_in_words(code, line) if code else "outside of the program",
                "last": f"its last: {last.words}" if last else "it has called none yet",
            }
            self._store.set(f"record/{self._round}/{self._rank}", json.dumps(record))
            self._round += 1

    def _read(self) -> None:
        """Take over what rank 0 has found."""
        if not self.parted and self._store.check(["finding"]):
            finding = Finding(**json.loads(self._store.get("finding")))
            self.found.report, self.has_gone = finding.text, self._rank in finding.gone
            self.parted = finding.parted
        if self._left and (self.parted or self._store.check(["end"])):
            self._settled.set()

    # on rank 0

    def _compare(self) -> None:
        beats = self._gather("beat")
        counts = [[(name, group["count"]) for name, group in b["groups"].items()] for b in beats.values()]
        if counts != self._counts:
            self._counts, self._changed = counts, time.monotonic()
        is_still = not self._waited and time.monotonic() - self._changed > self._after_s
        if not self.parted and (have_parted(beats) or is_still):
            self._changed = time.monotonic()  # when to look again
            self._report()
        if len(beats) == len(self._ranks) and all(beat["left"] for beat in beats.values()):
            self._store.set("end", "")

    def _report(self) -> None:
        """Ask all ranks for their records, compare them call by call, and publish the result."""
        number = self._round
        self._store.set(f"wanted/{number}", "")
        self._publish()
        wait_for(self._store, [f"record/{number}/{rank}" for rank in self._ranks], ANSWER_S)
        finding = find_parting(self._gather(f"record/{number}"), len(self._ranks))
        if not finding.text or (self._waited and not finding.parted):
            return
        self._waited = True
        self._store.set("finding", json.dumps(finding._asdict()))
        keep_finding((OutOfStep if finding.parted else TimeoutError)(finding.text))
        print(f"check_in_step: {finding.text}", file=sys.stderr, flush=True)

    def _gather(self, what: str) -> Mapping[int, Any]:
        """What the ranks have published under a name; without those that have not."""
        keys = {rank: f"{what}/{rank}" for rank in self._ranks}
        return {
            rank: json.loads(self._store.get(key)) for rank, key in keys.items() if self._store.check([key])
        }


def _own_connection(part: str) -> dist.Store:
    """The library's store over a connection of its own, where the store has such: the program may be inside
    a blocking call of the default one."""
    store = library_store(part)
    try:
        return store.clone()  # pyright: ignore[reportAttributeAccessIssue]
    except (AttributeError, RuntimeError):  # FileStore and HashStore open their file, or a lock, each time
        return store
