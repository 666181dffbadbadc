"""check_in_step: say at which collective, and on which line of the program, the ranks part."""

from __future__ import annotations

import json
import linecache
import math
import os
import sys
import threading
import time
import weakref
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from traceback import walk_tb
from types import CodeType
from typing import Any

import torch.distributed as dist

from fsdp_utils.collectives.c10d_hooks import Call, listen_to_calls
from fsdp_utils.collectives.program_line import GATHER_OBJECT, find_line, place_in_words
from fsdp_utils.collectives.signature import ROOTED, Signature, signature
from fsdp_utils.distributed.agreement import has_peers, library_store, rank_names, wait_for
from fsdp_utils.distributed.rank_errors import keep_finding

POLL_S = 0.5  # how often a rank publishes where it is, and the first rank compares
ANSWER_S = 3.0  # for the ranks to publish their records once they are asked
COMING_S = 2.0  # for the others to come to a call that has failed on this rank
LEFT = "has left the block"  # without an error
RESTS = 0.05  # a rank that waits uses less CPU, as a share of the time
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
    call differs, where an all_to_all expects another number of elements than the peer gives, where equal
    calls come from different lines, or where a rank leaves the block while others wait in a collective for
    it. This is found within about a second. Rank 0 then prints a report to stderr, and each rank raises it
    at its next collective, or at the end of the block. A rank that already waits inside a collective cannot
    be interrupted: it raises when its own wait ends, which is when a peer has gone or at the time-out of its
    process group. Where the time of `run_on_ranks` ends first, it raises the report.

    A rank that computes for long while others wait for it looks like a hang, and may be none. Rank 0 reports
    such a wait once, after `after_s`, and nothing is raised. The same holds if all ranks wait in the same
    collective, such as in a receive that nobody sends to, and if a rank has left the block that others wait
    for on a group that threads of the program call on: the thread may call yet.

    Not watched: send, recv and what is built of them (batch_isend_irecv, pipelines), so a send without its
    recv is found only through the collectives that follow it; monitored_barrier; and the values of tensors.
    Lines are not compared of broadcast, reduce, gather and scatter, which one rank may call on a line of its
    own, nor of gather_object. Where more bytes arrive than a rank expects, gloo ends its process before the
    ranks are compared. Dimensions of size 1 do not count as part of a shape.

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
    with listen_to_calls(watch.collective):  # until all have left: a thread of the program may go on calling
        try:
            yield watch.found
        except OutOfStep:
            watch.leave("raised OutOfStep", wait_s=0)
            raise
        except BaseException as error:
            report = watch.leave(f"left the block by {type(error).__name__}", wait_s=ANSWER_S)
            if watch.parted and _is_from_collective(error):
                raise OutOfStep(report) from error
            if report and hasattr(error, "add_note"):  # from Python 3.11 on
                error.add_note(report)  # pyright: ignore[reportAttributeAccessIssue]
            raise
        else:
            report = watch.leave(LEFT, wait_s=after_s + ANSWER_S)
            if report and watch.parted:
                raise OutOfStep(report)
        finally:
            watch.stop()


# ---- what is recorded of a call -------------------------------------------------------------------


class _Site:
    """One way to call a collective."""

    def __init__(
        self, what: Signature, unit: str | None, code: CodeType | None, line: int, own: int, by_line: bool
    ):
        place = place_in_words("" if code is None else code.co_filename, line)
        of_unit = "" if unit is None else f", for {unit or 'the root'}"  # of FSDP2, that the call works for
        self.words = f"{what.words()}{of_unit}, {place}"
        rooted = what.kind in ROOTED or unit == GATHER_OBJECT
        # What has to be the same on all ranks: the call, and its line.
        self.compared = (f"{what.agreed()}|{unit}", place if by_line and not rooted else "")
        self.hashed = "|".join(self.compared).encode()
        self.balance = what.balance(own)


class _Calls:
    """The calls of one process group on this rank."""

    def __init__(self, ranks: Sequence[int]) -> None:
        self.ranks = list(ranks)
        self.count = 0
        self.chain = 0  # a hash of all calls until now
        self.balance = 0  # the sum of theirs
        self.threaded = False  # whether a thread of the program calls here, which may outlast the block
        self.known: dict[tuple[Any, ...], _Site] = {}
        self.window: deque[tuple[int, _Site, tuple[int, int]]] = deque(maxlen=WINDOW)

    def add(self, site: _Site) -> None:
        self.count += 1
        self.chain = zlib.crc32(site.hashed, self.chain)
        self.balance += site.balance
        self.window.append((self.count, site, (self.chain, self.balance)))


def _is_from_collective(error: BaseException) -> bool:
    """Did torch.distributed raise it, an operator that it called, or the wait for a collective?"""
    places = [(frame.f_code.co_filename, line) for frame, line in walk_tb(error.__traceback__)]
    ours = str(Path(__file__).parent)
    places = [place for place in places if not place[0].startswith(ours)]
    return isinstance(error, RuntimeError) and bool(places) and _may_wait(*places[-1])


def _may_wait(file: str, line: int, rests: bool = True) -> bool:
    """Does a rank wait for a collective whose innermost line this is, of torch or of the program?

    Args:
        rests: whether the rank uses no CPU: operators and backward compute, too.
    """
    if ".wait(" in linecache.getline(file, line):
        return True
    if f"torch{os.sep}distributed{os.sep}" in file:
        return rests and f"{os.sep}checkpoint{os.sep}" not in file  # whose lines read and write files
    operators = (f"torch{os.sep}_ops.py", f"autograd{os.sep}graph.py", f"parallel{os.sep}distributed.py")
    return rests and file.endswith(operators)


# ---- the watch ------------------------------------------------------------------------------------

_uses: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()  # blocks entered, by default group


class _Watch(threading.Thread):
    """Records this rank's calls, publishes their hashes and, on rank 0, compares those of all ranks."""

    def __init__(self, after_s: float, by_line: bool) -> None:
        super().__init__(name="check_in_step", daemon=True)
        self.found = InStep()
        self.parted = False
        self._after_s, self._by_line = after_s, by_line
        self._rank, self._world_size = dist.get_rank(), dist.get_world_size()
        world = dist.group.WORLD
        _uses[world] = number = _uses.get(world, 0) + 1
        self._store = _own_connection(f"in_step/{number}")
        self._main = threading.get_ident()
        self._groups: dict[str, _Calls] = {}
        self._last: _Site | None = None  # this rank's last call
        self._left = ""  # how this rank has left the block
        self._left_at = 0.0
        self._over, self._settled, self._wake = threading.Event(), threading.Event(), threading.Event()
        self._round = 0  # of records that were asked for
        self._clocks = (0.0, 0.0)  # CPU seconds of the program, and the time
        self._rests = False  # whether it has used next to no CPU since the record before
        self._reported = False  # a wait, on rank 0
        self._changed = time.monotonic()  # when the counts of the ranks changed last, on rank 0
        self._counts: Any = None

    # in the threads of the program

    def collective(self, call: Call, issue: Callable[[], Any]) -> Any:
        """Record a call, then issue it."""
        if call.kind in _POINT_TO_POINT:
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
            if len(calls.known) == WINDOW:  # such as all_to_all, whose sizes may differ in each step
                calls.known.clear()
            own = calls.ranks.index(self._rank)
            site = calls.known[key] = _Site(what, unit, code, line, own, self._by_line)
        if threading.get_ident() != self._main and not threading.current_thread().name.startswith("Dummy-"):
            calls.threaded = True  # Dummy: threads of torch, such as backward's on a GPU
        calls.add(site)
        self._last = site
        return issue()

    def leave(self, how: str, *, wait_s: float) -> str:
        """The program leaves the block: wait for the comparison, at most that long; returns the report."""
        self._left_at, self._left = time.monotonic(), how
        if wait_s > 0 and how != LEFT:
            with suppress(RuntimeError):  # the store has gone with its rank
                self._store.set("ask", "")
        self._wake.set()
        self._settled.wait(wait_s)
        if wait_s == 0:
            with suppress(RuntimeError):
                self._publish()
        return self.found.report

    def stop(self) -> None:
        self._over.set()
        self._wake.set()
        self.join(ANSWER_S + 2 * POLL_S)
        if self._rank == 0:
            keep_finding(None)  # this rank raises it, or the program goes on

    # in the thread of the watch

    def run(self) -> None:
        try:
            while not self._over.is_set():
                self._publish()
                self._answer()
                if self._rank == 0:
                    self._compare()
                self._read()
                if self._settled.is_set():
                    return
                self._wake.wait(POLL_S / 10 if self._left else POLL_S)
                self._wake.clear()
        except RuntimeError:  # the store is gone, and its rank with it
            self._settled.set()

    def _publish(self) -> None:
        before, self._clocks = self._clocks, (time.process_time() - time.thread_time(), time.monotonic())
        used, passed = (now - then for now, then in zip(self._clocks, before, strict=True))
        self._rests = used < RESTS * passed
        beat = {"left": self._left, "groups": {n: self._hashes(c) for n, c in dict(self._groups).items()}}
        self._store.set(f"beat/{self._rank}", json.dumps(beat))

    @staticmethod
    def _hashes(calls: _Calls) -> dict[str, Any]:
        window = list(calls.window)
        last = window[-1][0] if window else 0
        chains = {n: c for n, _, c in window if n > last - _RECENT or n % _EVERY == 0}
        return {"ranks": calls.ranks, "count": last, "chains": chains, "threaded": calls.threaded}

    def _answer(self) -> None:
        """Publish the records of this rank where rank 0 asks for them."""
        while self._store.check([f"wanted/{self._round}"]):
            groups, sites = {}, {}
            for name, calls in dict(self._groups).items():
                window = list(calls.window)
                groups[name] = {
                    "ranks": calls.ranks,
                    "threaded": calls.threaded,
                    "first": window[0][0] if window else 1,
                    "sites": [sites.setdefault(site, len(sites)) for _, site, _ in window],
                }
            frame, last = sys._current_frames().get(self._main), self._last
            code, line, _ = find_line(frame)
            record = {
                "left": self._left,
                "groups": groups,
                "sites": [(*site.compared, site.balance, site.words) for site in sites],
                "stands": code and place_in_words(code.co_filename, line),
                "waits": frame and _may_wait(frame.f_code.co_filename, frame.f_lineno, self._rests),
                "last": f"its last: {last.words}" if last else "it has called none yet",
            }
            self._store.set(f"record/{self._round}/{self._rank}", json.dumps(record))
            self._round += 1

    def _read(self) -> None:
        """Take over what rank 0 has found."""
        if not self.parted and self._store.check(["report"]):
            report = json.loads(self._store.get("report"))
            self.found.report, self.parted = report["text"], report["parted"]
            # By an error: a wait that was reported may explain it, once the others have had time to come.
            if self._left and self._left != LEFT and time.monotonic() - self._left_at > COMING_S:
                self._settled.set()
        if self._left and (self.parted or self._store.check(["end"])):
            self._settled.set()

    # on rank 0

    def _compare(self) -> None:
        everyone = range(self._world_size)
        keys = [f"beat/{rank}" for rank in everyone]
        present = [rank for rank in everyone if self._store.check([keys[rank]])]
        beats = {rank: json.loads(self._store.get(keys[rank])) for rank in present}
        counts = [[(n, g["count"]) for n, g in beat["groups"].items()] for beat in beats.values()]
        if counts != self._counts:
            self._counts, self._changed = counts, time.monotonic()
        differs = _have_parted(beats)
        is_still = time.monotonic() - self._changed > self._after_s and not self._reported
        asked = self._store.check(["ask"])  # by a rank that leaves with an error
        if not self.parted and (differs or is_still or asked):
            self._changed = time.monotonic()  # when to look again
            self._report(asked)
            self._store.delete_key("ask")
        if len(beats) == self._world_size and all(beat["left"] for beat in beats.values()):
            self._store.set("end", "")

    def _report(self, asked: bool) -> None:
        """Ask all ranks for their records, compare them call by call, and publish the result."""
        number = self._round
        self._store.set(f"wanted/{number}", "")
        self._answer()
        keys = [f"record/{number}/{rank}" for rank in range(self._world_size)]
        wait_for(self._store, keys, ANSWER_S)
        records = {
            rank: json.loads(self._store.get(key))
            for rank, key in enumerate(keys)
            if self._store.check([key])
        }
        text, parted = _where_they_part(records, self._world_size)
        if not text or (self._reported and not (parted or asked)):
            return
        self._reported = True
        self._store.set("report", json.dumps({"text": text, "parted": parted}))
        keep_finding((OutOfStep if parted else TimeoutError)(text))
        print(f"check_in_step: {text}", file=sys.stderr, flush=True)


def _own_connection(part: str) -> dist.Store:
    """The library's store over a connection of its own, where the store has such: the program may be inside
    a blocking call of the default one."""
    store = library_store(part)
    try:
        return store.clone()  # pyright: ignore[reportAttributeAccessIssue]
    except (AttributeError, RuntimeError):  # FileStore and HashStore open their file, or a lock, each time
        return store


def _have_parted(beats: Mapping[int, Any]) -> bool:
    """Do two ranks have different hashes of as many calls, or has a rank left that others wait for?"""
    seen: dict[tuple[str, str], list[tuple[int, int]]] = {}
    for beat in beats.values():
        for name, group in beat["groups"].items():
            for number, hashes in group["chains"].items():
                same = seen.setdefault((name, number), [])
                same.append(hashes)
                if same[0][0] != hashes[0]:
                    return True
                if len(same) == len(group["ranks"]) and sum(balance for _, balance in same) != 0:
                    return True
    return any(beat["left"] and _lacks(beats, rank) for rank, beat in beats.items())


def _lacks(beats: Mapping[int, Any], rank: int) -> bool:
    """Has another rank called a collective that this one has not?"""
    own = beats[rank]["groups"]
    return any(
        rank in group["ranks"]
        and group["count"] > own.get(name, {"count": 0})["count"]
        and not group["threaded"]
        for other, beat in beats.items()
        if other != rank
        for name, group in beat["groups"].items()
    )


# ---- the report -----------------------------------------------------------------------------------


def _where_they_part(records: Mapping[int, Any], world_size: int) -> tuple[str, bool]:
    """The report in words, and whether the ranks have parted for good; "" where they are in step."""
    silent = [rank for rank in range(world_size) if rank not in records]
    groups = sorted({name for record in records.values() for name in record["groups"]})
    waits = ""
    for name in groups:
        holders = {rank: record for rank, record in records.items() if name in record["groups"]}
        members = next(iter(holders.values()))["groups"][name]["ranks"]
        start = max(record["groups"][name]["first"] for record in holders.values())
        end = max(_count(record["groups"][name]) for record in holders.values())
        for number in range(start, end + 1):
            called = {
                rank: records[rank]["groups"][name]["sites"][number - records[rank]["groups"][name]["first"]]
                for rank in holders
                if _count(records[rank]["groups"][name]) >= number
            }
            sites = {rank: records[rank]["sites"][site] for rank, site in called.items()}
            whats, lines, balances, _ = zip(*sites.values(), strict=True)
            absent = [rank for rank in members if rank not in called]
            differ = len({*whats}) > 1 or (not absent and sum(balances) != 0)
            other_line = not differ and len({*lines}) > 1
            if not (differ or other_line or absent):
                continue
            title = f"collective {number} of {_group_words(members, world_size)}"
            told = _by_words({rank: site[-1] for rank, site in sites.items()})
            threaded = any(record["groups"][name]["threaded"] for record in holders.values())
            gone = [rank for rank in absent if rank in records and records[rank]["left"] and not threaded]
            told += [f"  rank {rank}: {_absent(records, rank)}" for rank in absent]
            if other_line:
                told.append(
                    "If it is right to call them from different lines, use check_in_step(by_line=False)."
                )
            if differ or other_line:
                oldest = "" if number > start or start == 1 else " or before, which no rank remembers"
                return "\n".join([f"the ranks part at {title}{oldest}.", *told]), True
            text = "\n".join([f"{title} waits for {rank_names(gone or absent)}.", *told])
            if gone:
                return text, True
            waits = waits or text
            break
    if not waits and silent and any(record["waits"] or record["left"] for record in records.values()):
        waits = f"nothing is heard of {rank_names(silent)}: has it entered check_in_step, and does it live?"
    waiting = [rank for rank, record in records.items() if record["waits"] and not record["left"]]
    if not waits and waiting and all(rank in waiting or record["left"] for rank, record in records.items()):
        told = {
            rank: f"{one['left'] or 'waiting ' + _place_of(one)}; {one['last']}"
            for rank, one in records.items()
        }
        who = "all ranks wait" if len(waiting) == world_size else f"waiting: {rank_names(waiting)}"
        waits = "\n".join([f"{who}, and no rank calls another collective.", *_by_words(told)])
    return waits, False


def _count(group: Any) -> int:
    return group["first"] + len(group["sites"]) - 1


def _by_words(words: Mapping[int, str]) -> list[str]:
    ranks: dict[str, list[int]] = {}
    for rank, text in sorted(words.items()):
        ranks.setdefault(text, []).append(rank)
    return [f"  {rank_names(those)}: {text}" for text, those in ranks.items()]


def _place_of(record: Any) -> str:
    return record["stands"] or "outside of the program"


def _absent(records: Mapping[int, Any], rank: int) -> str:
    """What a rank does that has not called a collective."""
    if rank not in records:
        return "does not answer"
    record = records[rank]
    return f"{record['left'] or 'has not called it, and stands ' + _place_of(record)}; {record['last']}"


def _group_words(ranks: Sequence[int], world_size: int) -> str:
    return "all ranks" if len(ranks) == world_size else f"the group of {rank_names(ranks)}"
