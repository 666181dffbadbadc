"""Do all ranks want the same thing? Asked before any collective, so that a mistake ends in words.

A collective that one rank does not enter hangs until the process group gives up. So the ranks first meet in
the group's key-value store, where a rank can wait for a short while and then say who did not come. Once they
agree they talk through a gloo group of their own: it does not disturb the training's collectives, and when a
rank dies or leaves, its connections close and the others know at once.
"""

import gc
import hashlib
import json
import os
import socket
import time
import traceback
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NoReturn, TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from fsdp_utils.checkpoint.errors import CheckpointError
from fsdp_utils.torch_internals.groups import default_store, process_groups, set_group_timeout

T = TypeVar("T")

# How long a rank waits for the others to enter the same call.
WAIT_S = 30.0
# How long one rank may take longer than the others to read or write its part.
TRANSFER_LIMIT_S = 3600.0

_SLOWEST_POLL_S = 0.05


class _Link:
    """What lasts from call to call within a default process group: the ranks' own group, where they met."""

    def __init__(self, world: Any) -> None:
        # Weak: torch.distributed alone decides how long a group, with its sockets, lives.
        self.world: Callable[[], Any] = weakref.ref(world)
        self.group: Callable[[], dist.ProcessGroup | None] = lambda: None
        self.next_meeting = 0


_link: _Link | None = None


def _current_link() -> _Link:
    global _link
    if _link is None or _link.world() is not dist.group.WORLD:
        _link = _Link(dist.group.WORLD)
    return _link


class Ranks:
    """The ranks that have agreed to do one thing together. Alone in it when there is no process group."""

    def __init__(self, action: str, wait_s: float) -> None:
        self.action = action
        self.distributed = dist.is_available() and dist.is_initialized()
        self.rank = dist.get_rank() if self.distributed else 0
        self.world_size = dist.get_world_size() if self.distributed else 1
        self.facts: list[dict[str, Any]] = []  # by rank
        self.hosts: list[str] = []  # by rank
        self.consequence = ""  # what a failure from here on means, for the error
        self.in_background = False  # while the program goes on, and may end
        self.meeting = 0
        self.group: dist.ProcessGroup | None = None
        self._wait_s = wait_s
        self._shared: CheckpointError | None = None  # the error that every rank has

    def all(self, fn: Callable[[], T]) -> list[T]:
        """What fn returns on each rank, by rank; if it fails on any, the same CheckpointError on all."""
        return self._gather(fn, lambda result: result)[1]

    def each(self, fn: Callable[[], T]) -> T:
        """What fn returns on this rank; if it fails on any rank, the same CheckpointError on all."""
        return self._gather(fn, lambda result: None)[0]

    def first(self, fn: Callable[[], T]) -> T:
        """What fn returns on rank 0, which alone calls it; if it fails, the same CheckpointError on all."""
        answer: list[Any] = [None]
        if self.rank == 0:
            try:
                answer = [(fn(), None)]
            except Exception as error:
                answer = [(None, _words(error))]
        if self.distributed:
            dist.broadcast_object_list(answer, src=0, group=self.group)
        result, problem = answer[0]
        if problem:
            self._fail({0: problem})
        return result

    def _gather(self, fn: Callable[[], T], send: Callable[[T], Any]) -> tuple[T, list[Any]]:
        result, sent, problem = None, None, None
        try:
            result = fn()
            sent = send(result)
        except Exception as error:
            problem = _words(error)
        answers: list[Any] = [(sent, problem)]
        if self.distributed:
            answers = [None] * self.world_size
            dist.all_gather_object(answers, (sent, problem), group=self.group)
        if problems := {rank: problem for rank, (_, problem) in enumerate(answers) if problem}:
            self._fail(problems)
        return result, [sent for sent, _ in answers]  # type: ignore[return-value]

    def _fail(self, problems: dict[int, str]) -> NoReturn:
        """Raise what every rank raises now."""
        self._shared = CheckpointError(_join(self.action, problems, self.world_size) + self.consequence)
        raise self._shared

    def threads(self) -> int:
        """How many processors of this host are this rank's."""
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        return max(1, cores // self.hosts.count(self.hosts[self.rank]))

    @contextmanager
    def guard(self) -> Iterator[None]:
        """Whatever goes wrong inside becomes a CheckpointError, here and on the ranks that wait."""
        try:
            yield
        except BaseException as error:
            if self._shared is not None and (error is self._shared or isinstance(error, CheckpointException)):
                raise self._shared from None  # all() or first() has told it to every rank, if inside of DCP
            if (
                isinstance(error, CheckpointException) and not self._cut_off()
            ):  # DCP has told it to every rank
                text = _join(
                    self.action, {rank: _words(one) for rank, one in _causes(error)}, self.world_size
                )
                text += self.consequence
            else:
                cause = next((one for _, one in _causes(error)), error)
                text = self._tell(
                    f"{self.action}: rank {self.rank} failed, or lost a rank that did: {_words(cause)}"
                    + self._hint()
                    + self.consequence
                )
            self._leave(error)
            if not isinstance(error, Exception | CheckpointException):
                raise
            raise CheckpointError(text) from error

    def check_group(self) -> None:
        """To be called before DCP, which without a process group would take each rank for the only one."""
        if self._cut_off():
            raise RuntimeError("there is no process group any more")

    def _cut_off(self) -> bool:
        """Has the program destroyed the process group meanwhile?"""
        return self.distributed and not dist.is_initialized()

    def _hint(self) -> str:
        if self._cut_off():
            return ". The process group was destroyed meanwhile: call .wait() before destroy_process_group()"
        if self.in_background:  # a rank that destroyed its group looks like one that died
            return ". If it has only ended too early: call .wait() before destroy_process_group()"
        return ""

    def _tell(self, text: str) -> str:
        """The failure that was first told on any rank; this one when it is the first."""
        if not self.distributed:
            return text
        try:
            store, key = _store(), f"{self.meeting}/failure"
            if store.add(f"{key}s", 1) == 1:
                store.set(key, text)
            return store.get(key).decode() if _wait_for(store, key, 1.0) else text
        except Exception:  # the store has gone with its rank
            return text

    def _leave(self, error: BaseException) -> None:
        """Close this rank's connections, which is what tells the others. The next call makes new ones."""
        if self.group is None:
            return
        group, self.group = self.group, None
        # The sockets close when the last reference to the group goes, and the frames of tracebacks hold some.
        causes = [error, *(one for _, one in _causes(error))]
        for one in causes:
            cause: BaseException | None = one
            while cause is not None:
                traceback.clear_frames(cause.__traceback__)
                cause = cause.__cause__ or cause.__context__
        if group in process_groups():  # else the program has destroyed all its groups
            dist.destroy_process_group(group)
        del group
        gc.collect()  # frames and exceptions refer to each other

    def _connect(self) -> None:
        """The ranks' own group; made once, at a moment when all ranks are known to be here."""
        link = _current_link()
        group = link.group()
        if group is None or group not in process_groups():
            made = dist.new_group(backend="gloo", timeout=timedelta(seconds=self._wait_s))
            assert isinstance(made, dist.ProcessGroup)
            set_group_timeout(made, TRANSFER_LIMIT_S)
            link.group, group = weakref.ref(made), made
        self.group = group


def agree(action: str, facts: Callable[[], dict[str, Any]], *, wait_s: float = WAIT_S) -> Ranks:
    """Every rank enters, and every rank means the same; or every rank has the same CheckpointError.

    Args:
        action: the name of the caller, for the error.
        facts: what must be the same on all ranks (values that JSON can hold). Keys that begin with "_" may
            differ: they are only passed on, in `Ranks.facts`. An exception in it is told to all ranks.
        wait_s: seconds to wait for the other ranks.

    Returns:
        The ranks, connected.

    Raises:
        CheckpointError: a rank did not come, the facts differ, or facts failed on some rank.
    """
    ranks = Ranks(action, wait_s)
    try:
        mine: dict[str, Any] = {"facts": {"call": action, **facts()}, "host": socket.gethostname()}
    except Exception as error:
        mine = {"problem": _words(error)}
    if not ranks.distributed:
        verdict = _verdict(action, [mine])
    else:
        try:
            verdict = _meet(ranks, json.dumps(mine), wait_s)
        except Exception as error:
            raise CheckpointError(
                f"{action}: rank {ranks.rank} cannot reach the process group's store (has the rank or the "
                "host "
                f"that keeps it gone?): {_words(error)}"
            ) from error
    if "problem" in verdict:
        raise CheckpointError(verdict["problem"])
    ranks.facts = [answer["facts"] for answer in verdict["answers"]]
    ranks.hosts = [answer["host"] for answer in verdict["answers"]]
    if ranks.distributed:
        with ranks.guard():
            ranks._connect()
    return ranks


def _meet(ranks: Ranks, mine: str, wait_s: float) -> dict[str, Any]:
    """Put mine into the store, and take out the verdict on what all ranks put there.

    Meetings are numbered. Whoever comes last, or loses patience first, decides a meeting, once for all. A
    rank that comes to a meeting that was decided without it goes on to the next, so that ranks find together
    again after one of them has been to meetings alone.
    """
    store = _store()
    link = _current_link()
    number = link.next_meeting
    while store.check([f"{number}/verdict"]) or store.add(f"{number}/came/{ranks.rank}", 1) > 1:
        number += 1
    ranks.meeting, link.next_meeting = number, number + 1
    verdict_key = f"{number}/verdict"

    store.set(f"{number}/answer/{ranks.rank}", mine)
    last = store.add(f"{number}/count", 1) == ranks.world_size
    if (last or not _wait_for(store, verdict_key, wait_s)) and store.add(f"{number}/deciders", 1) == 1:
        everyone = range(ranks.world_size)
        missing = [rank for rank in everyone if not store.check([f"{number}/answer/{rank}"])]
        if missing:
            here = [rank for rank in everyone if rank not in missing]
            verdict = {
                "problem": f"{ranks.action}: expected all {ranks.world_size} ranks to enter it, found only "
                f"{_names(here)} after {wait_s:g} s; missing: {_names(missing)}. Call it on every rank: not "
                "under `if rank == 0`, and not under a condition that each rank decides for itself."
            }
        else:
            verdict = _verdict(
                ranks.action, [json.loads(store.get(f"{number}/answer/{rank}")) for rank in everyone]
            )
        store.set(verdict_key, json.dumps(verdict))
    if not _wait_for(store, verdict_key, wait_s):  # who decides sets it at once, unless it dies in between
        raise TimeoutError(f"no verdict on meeting {number} after {wait_s:g} s")
    return json.loads(store.get(verdict_key))


def _store() -> dist.Store:
    return dist.PrefixStore("fsdp_utils/checkpoint", default_store())


def _wait_for(store: dist.Store, key: str, seconds: float) -> bool:
    """Does key appear within that time? Checks and sleeps: a blocking get would lock the store's client."""
    limit, poll_s = time.monotonic() + seconds, 0.001
    while not (there := store.check([key])) and time.monotonic() < limit:
        time.sleep(poll_s)
        poll_s = min(2 * poll_s, _SLOWEST_POLL_S)
    return there


def _verdict(action: str, answers: list[dict[str, Any]]) -> dict[str, Any]:
    problems = {rank: answer["problem"] for rank, answer in enumerate(answers) if "problem" in answer}
    if problems:
        return {"problem": _join(action, problems, len(answers))}
    for name in answers[0]["facts"]:
        if name.startswith("_"):
            continue
        by_value: dict[str, list[int]] = {}
        for rank, answer in enumerate(answers):
            by_value.setdefault(json.dumps(answer["facts"].get(name)), []).append(rank)
        if len(by_value) > 1:
            found = "; ".join(f"{_names(ranks)}: {value}" for value, ranks in by_value.items())
            return {
                "problem": f"{action}: expected the same {name} on all ranks, found {found}. Decide on one "
                "rank "
                "and broadcast the decision."
            }
    return {"answers": answers}


def _join(action: str, problems: dict[int, str], world_size: int) -> str:
    """Several ranks' problems in one text; the same problem is told once."""
    by_text: dict[str, list[int]] = {}
    for rank, text in problems.items():
        by_text.setdefault(text, []).append(rank)
    told = [
        text if len(ranks) == world_size else f"{_names(ranks)}: {text}" for text, ranks in by_text.items()
    ]
    return f"{action}: " + "\n".join(told)


def _words(error: BaseException) -> str:
    if isinstance(error, FileNotFoundError) and error.filename:
        return (
            f"{error.filename}: expected a file or a directory, found none (did another program delete the "
            "checkpoint?)"
        )
    return str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"


def _causes(error: BaseException) -> list[tuple[int, BaseException]]:
    """What failed inside of DCP, by rank."""
    failures = error.failures if isinstance(error, CheckpointException) else {}
    return [(rank, one[0] if isinstance(one, tuple) else one) for rank, one in failures.items()]


def _names(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"


def fingerprint(lines: list[str]) -> str:
    """A short name for a long list, to compare it between ranks."""
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]
