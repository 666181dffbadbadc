"""check_in_step: say at which collective, and on which line of the program, the ranks part."""

from __future__ import annotations

import json
import linecache
import math
import os
import sys
import sysconfig
import threading
import time
import weakref
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from traceback import walk_tb
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from fsdp_utils.collectives.c10d_hooks import Call, listen_to_calls
from fsdp_utils.distributed.agreement import has_peers, library_store, rank_names, wait_for
from fsdp_utils.torch_internals.fsdp import fsdp2_unit_of_frame

POLL_S = 0.5  # how often a rank publishes where it is, and the first rank compares
ANSWER_S = 3.0  # for the ranks to publish their records once they are asked
LEFT = "has left the block"  # without an error
WINDOW = 4096  # calls that a rank remembers of each group
_RECENT, _EVERY = 48, 64  # hashes are published of so many last calls, and of every so-many-th before

# Paired one to one between two ranks, not by order within the group.
_POINT_TO_POINT = {"send", "recv"}
# One rank does something else than the others in these, so programs may call them on two lines.
_ROOTED = {"broadcast", "reduce", "gather", "scatter"}
# Which side of a call must have the same size on all ranks.
_SAME_IN, _SAME_OUT = {"all_reduce", "reduce", "broadcast", "reduce_scatter"}, {"all_gather"}


class OutOfStep(RuntimeError):
    """The ranks have called different collectives. The message says at which one they part, and where.

    Example::

        try:
            with check_in_step():
                train_step(batch)
        except OutOfStep as error:
            print(error)
            # the ranks part at collective 1 of all ranks.
            #   rank 0: all_reduce, 192 bytes, at train.py:4
            #   rank 1: all_reduce, 192 bytes, at train.py:6
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
    or mixes up data silently. Here each rank records kind, size and line of every call. Nothing is sent with
    the training's own collectives. Twice a second a thread on each rank publishes a hash of the record in the
    process group's store, and rank 0 compares the hashes.

    The ranks part where kinds or sizes differ, where equal calls come from different lines, or where a rank
    leaves the block while others wait in a collective for it. This is found within about a second. Rank 0
    then prints a report to stderr, and each rank raises it at its next collective, or at the end of the
    block. A rank that already waits inside a collective cannot be interrupted: it raises when its own wait
    ends, which is when a peer has gone or at the time-out of its process group.

    A rank that computes for long while others wait for it looks like a hang, and may be none. Rank 0 reports
    such a wait once, after `after_s`, and nothing is raised.

    send and recv are not compared, nor the lines of broadcast, reduce, gather and scatter, which one rank may
    call on a line of its own.

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
    except OutOfStep:
        watch.leave("raised OutOfStep", wait_s=0)
        raise
    except BaseException as error:
        report = watch.leave(f"left the block by {type(error).__name__}", wait_s=ANSWER_S)
        if report and _is_from_collective(error):
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


class _Site(NamedTuple):
    """One way to call a collective."""

    kind: str
    nbytes: int
    unit: str | None  # of FSDP2, that the call works for
    file: str
    line: int

    def words(self) -> str:
        """Such as "all_gather, 1,024 bytes, for blocks.0, at train.py:31 `x = block(x)`"."""
        size = "" if self.kind == "barrier" else f", {self.nbytes:,} bytes"
        unit = "" if self.unit is None else f", for {self.unit or 'the root'}"
        return f"{self.kind}{size}{unit}, {_place(self.file, self.line)}"

    def compared(self, by_line: bool) -> str:
        """What has to be the same on all ranks."""
        size = self.nbytes if self.kind in _SAME_IN | _SAME_OUT else ""
        line = _place(self.file, self.line) if by_line and self.kind not in _ROOTED else ""
        return f"{self.kind}|{size}|{self.unit}|{line}"


class _Known(NamedTuple):
    site: int  # its index in the list of this rank's sites
    hashed: bytes  # of what is compared


class _Calls:
    """The calls of one process group on this rank."""

    def __init__(self, ranks: Sequence[int]) -> None:
        self.ranks = list(ranks)
        self.count = 0
        self.chain = 0  # a hash of all calls until now
        self.window: deque[tuple[int, int, int]] = deque(maxlen=WINDOW)  # number, site, chain

    def add(self, known: _Known) -> None:
        self.count += 1
        self.chain = zlib.crc32(known.hashed, self.chain)
        self.window.append((self.count, known.site, self.chain))


_OURS, _INSTALLED, _LIBRARY, _UNIT = range(4)


def _kind_of(code: CodeType) -> int:
    file = code.co_filename
    if file.endswith("_fsdp_param_group.py"):
        return _UNIT
    library = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))
    if file.startswith("<") and not file.startswith("<ipython"):
        return _LIBRARY
    if file.startswith(tuple(folder + os.sep for folder in library)):
        return _LIBRARY
    if f"{os.sep}site-packages{os.sep}" in file or f"{os.sep}dist-packages{os.sep}" in file:
        return _INSTALLED
    return _LIBRARY if file.startswith(sysconfig.get_path("stdlib") + os.sep) else _OURS


_kinds: dict[CodeType, int] = {}


def _find_line(frame: FrameType | None) -> tuple[CodeType | None, int, str | None]:
    """The innermost line of the program among the callers, and the unit of FSDP2 that the call is for."""
    unit = None
    code, line = None, 0
    while frame is not None:
        kind = _kinds.get(frame.f_code)
        if kind is None:
            kind = _kinds[frame.f_code] = _kind_of(frame.f_code)
        if kind == _OURS:
            return frame.f_code, frame.f_lineno, unit
        if kind == _INSTALLED and code is None:
            code, line = frame.f_code, frame.f_lineno
        elif kind == _UNIT and unit is None:
            unit = fsdp2_unit_of_frame(frame)
        frame = frame.f_back
    return code, line, unit


def _place(file: str, line: int) -> str:
    """A line of a file as a reader knows it: the same text on all ranks and hosts."""
    if not file:
        return "in backward"
    path = Path(file)
    in_cell = path.parent.name.startswith("ipykernel_") or file.startswith("<ipython")
    source = linecache.getline(file, line).strip()
    return (f"line {line} of the cell" if in_cell else f"at {path.name}:{line}") + (source and f" `{source}`")


def _is_from_collective(error: BaseException) -> bool:
    """Did torch.distributed raise it, or an operator that it called?"""
    files = [frame.f_code.co_filename for frame, _ in walk_tb(error.__traceback__)]
    distributed, operators = f"torch{os.sep}distributed{os.sep}", f"torch{os.sep}_ops.py"
    ours = str(Path(__file__).parent)
    files = [file for file in files if not file.startswith(ours)]
    return (
        isinstance(error, RuntimeError)
        and bool(files)
        and (
            distributed in files[-1]
            or files[-1].endswith(operators)
            or files[-1].endswith(f"autograd{os.sep}graph.py")
        )
    )


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
        self._known: dict[tuple[Any, ...], _Known] = {}
        self._sites: list[_Site] = []
        self._last = time.monotonic()  # this rank's last call
        self._left = ""  # how this rank has left the block
        self._over, self._settled, self._wake = threading.Event(), threading.Event(), threading.Event()
        self._round = 0  # of records that were asked for
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
        nbytes = call.bytes_out if call.kind in _SAME_OUT else call.bytes_in
        code, line, unit = _find_line(sys._getframe(1))
        key = (call.kind, nbytes, unit, code, line)
        known = self._known.get(key)
        if known is None:
            site = _Site(call.kind, nbytes, unit, "" if code is None else code.co_filename, line)
            known = self._known[key] = _Known(len(self._sites), site.compared(self._by_line).encode())
            self._sites.append(site)
        name = call.group.group_name
        calls = self._groups.get(name)
        if calls is None:
            calls = self._groups[name] = _Calls(dist.get_process_group_ranks(call.group))
        calls.add(known)
        self._last = time.monotonic()
        return issue()

    def leave(self, how: str, *, wait_s: float) -> str:
        """The program leaves the block: wait for the comparison, at most that long; returns the report."""
        self._left = how
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
        beat = {"left": self._left, "groups": {n: self._hashes(c) for n, c in dict(self._groups).items()}}
        self._store.set(f"beat/{self._rank}", json.dumps(beat))

    @staticmethod
    def _hashes(calls: _Calls) -> dict[str, Any]:
        window = list(calls.window)
        last = window[-1][0] if window else 0
        chains = {n: c for n, _, c in window if n > last - _RECENT or n % _EVERY == 0}
        return {"ranks": calls.ranks, "count": last, "chains": chains}

    def _answer(self) -> None:
        """Publish the records of this rank where rank 0 asks for them."""
        while self._store.check([f"wanted/{self._round}"]):
            groups = {}
            for name, calls in dict(self._groups).items():
                window = list(calls.window)
                groups[name] = {
                    "ranks": calls.ranks,
                    "first": window[0][0] if window else 1,
                    "sites": [site for _, site, _ in window],
                }
            record = {
                "left": self._left,
                "groups": groups,
                "compared": [site.compared(self._by_line) for site in self._sites],
                "words": [site.words() for site in self._sites],
                "idle": time.monotonic() - self._last,
                "stands": self._stands(),
            }
            self._store.set(f"record/{self._round}/{self._rank}", json.dumps(record))
            self._round += 1

    def _stands(self) -> str:
        code, line, _ = _find_line(sys._current_frames().get(self._main))
        return "" if code is None else _place(code.co_filename, line)

    def _read(self) -> None:
        """Take over what rank 0 has found."""
        if not self.parted and self._store.check(["report"]):
            report = json.loads(self._store.get("report"))
            self.found.report, self.parted = report["text"], report["parted"]
            if self._left and self._left != LEFT:  # by an error: a wait that was reported may explain it
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
        is_behind = _is_behind(beats, everyone)
        is_stuck = is_behind and time.monotonic() - self._changed > self._after_s and not self._reported
        asked = self._store.check(["ask"])  # by a rank that leaves with an error
        if not self.parted and (differs or is_stuck or asked):
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
    first: dict[tuple[str, str], int] = {}
    for beat in beats.values():
        for name, group in beat["groups"].items():
            for number, chain in group["chains"].items():
                if first.setdefault((name, number), chain) != chain:
                    return True
    return any(beat["left"] and _lacks(beats, rank) for rank, beat in beats.items())


def _lacks(beats: Mapping[int, Any], rank: int) -> bool:
    """Has another rank called a collective that this one has not?"""
    own = beats[rank]["groups"]
    return any(
        rank in group["ranks"] and group["count"] > own.get(name, {"count": 0})["count"]
        for other, beat in beats.items()
        if other != rank
        for name, group in beat["groups"].items()
    )


def _is_behind(beats: Mapping[int, Any], everyone: range) -> bool:
    if any(rank not in beats for rank in everyone):
        return True
    return any(_lacks(beats, rank) for rank in beats)


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
            keys = {records[rank]["compared"][site] for rank, site in called.items()}
            absent = [rank for rank in members if rank not in called]
            if len(keys) == 1 and not absent:
                continue
            title = f"collective {number} of {_group_words(members, world_size)}"
            lines = _called(records, called)
            gone = [rank for rank in absent if rank in records and records[rank]["left"]]
            for rank in absent:
                lines.append(f"  rank {rank}: {_absent(records, rank, name)}")
            if len(keys) > 1:
                oldest = "" if number > start or start == 1 else " or before, which no rank remembers"
                return f"the ranks part at {title}{oldest}.\n" + "\n".join(lines), True
            if gone:
                return f"{title} waits for {rank_names(gone)}.\n" + "\n".join(lines), True
            waits = waits or f"{title} waits for {rank_names(absent)}.\n" + "\n".join(lines)
            break
    if not waits and silent:
        waits = f"nothing is heard of {rank_names(silent)}: has it entered check_in_step, and does it live?"
    return waits, False


def _count(group: Any) -> int:
    return group["first"] + len(group["sites"]) - 1


def _called(records: Mapping[int, Any], called: Mapping[int, int]) -> list[str]:
    by_words: dict[str, list[int]] = {}
    for rank, site in sorted(called.items()):
        by_words.setdefault(records[rank]["words"][site], []).append(rank)
    return [f"  {rank_names(ranks)}: {words}" for words, ranks in by_words.items()]


def _absent(records: Mapping[int, Any], rank: int, name: str) -> str:
    """What a rank does that has not called a collective."""
    if rank not in records:
        return "does not answer"
    record = records[rank]
    group = record["groups"].get(name, {"sites": []})
    last = f"its last: {record['words'][group['sites'][-1]]}" if group["sites"] else "it has called none yet"
    if record["left"]:
        return f"{record['left']}; {last}"
    return f"has not called it, and stands {record['stands'] or 'outside of the program'}; {last}"


def _group_words(ranks: Sequence[int], world_size: int) -> str:
    return "all ranks" if len(ranks) == world_size else f"the group of {rank_names(ranks)}"
