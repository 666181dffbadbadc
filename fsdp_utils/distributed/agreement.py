"""How ranks agree: that all of them are here, that they want the same, and what failed on which of them.

A collective that one rank does not enter blocks until the process group's timeout. So `agree` first compares
the ranks through the process group's key-value store, where a rank can wait for a limited time and name the
ranks that are missing. After that they exchange results over a gloo group of their own: it does not disturb
the training's collectives, and when a rank dies or leaves it, its connections close and the others know.
"""

import gc
import hashlib
import json
import os
import socket
import time
import traceback
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist

from fsdp_utils.torch_internals.groups import default_store, process_groups, set_group_timeout

__all__ = [
    "Ranks",
    "agree",
    "by_ranks",
    "fingerprint",
    "has_peers",
    "library_store",
    "rank_names",
    "wait_for",
]

T = TypeVar("T")

# How long a rank waits for the others to enter the same call.
WAIT_S = 30.0

_SLOWEST_POLL_S = 0.05
_DECISION_S = 5.0  # for the deciding rank to publish the outcome, and for the ranks' own group to connect


# ---- the key-value store ---------------------------------------------------------------------------


def has_peers() -> bool:
    """Is there a process group whose ranks can answer? A `fake` group has one real rank."""
    return dist.is_available() and dist.is_initialized() and dist.get_backend() != "fake"


def library_store(part: str) -> dist.Store:
    """The process group's store, with the keys of one part of this library."""
    return dist.PrefixStore(f"fsdp_utils/{part}", default_store())


def wait_for(store: dist.Store, keys: Sequence[str], seconds: float) -> bool:
    """Are all of these keys set within that time? Polls: Store.wait would block the store's other users."""
    limit, poll_s = time.monotonic() + seconds, 0.001
    while not (found := store.check(list(keys))) and time.monotonic() < limit:
        time.sleep(poll_s)
        poll_s = min(2 * poll_s, _SLOWEST_POLL_S)
    return found


# ---- the ranks -------------------------------------------------------------------------------------


class LostRank(RuntimeError):
    """A collective of the ranks' own group failed: a rank did not answer in time, or has ended."""


class Ranks:
    """The ranks of the default process group, which tell each other results and failures.

    `agree` makes one whose ranks are known to be here, with a group of their own. Made directly, it uses the
    default group. Without a process group, and with a fake one, this process is the only rank.

    Args:
        action: what the ranks do together, for the errors; "" for nothing.
        error: the class of the errors that all ranks raise.
        told: which exceptions of a function are told to all ranks; others are raised on their rank alone.

    Attributes:
        facts: what each rank gave to `agree`, by rank.
        hosts: of each rank, by rank.
        consequence: what a failure from here on means; added to the error.
        in_background: whether the program goes on meanwhile, and may end.
        group: the ranks' own group.
    """

    def __init__(
        self, action: str, error: type[Exception], *, told: type[Exception] = Exception, topic: str = ""
    ) -> None:
        self.action = action
        self.error = error
        self.distributed = has_peers()
        self.rank = dist.get_rank() if self.distributed else 0
        self.world_size = dist.get_world_size() if self.distributed else 1
        self.facts: list[dict[str, Any]] = []
        self.hosts: list[str] = []
        self.consequence = ""
        self.in_background = False
        self.group: dist.ProcessGroup | None = None
        self._told = told
        self._topic = topic
        self._round = 0  # of this topic's comparisons in the store
        self._collective_s = 0.0
        self._shared: Exception | None = None  # the error that every rank has

    def all(self, fn: Callable[[], T]) -> list[T]:
        """What fn returns on each rank, by rank; if it fails on any, the same error on all."""
        return self._gather(fn, lambda result: result)[1]

    def each(self, fn: Callable[[], T]) -> T:
        """What fn returns on this rank; if it fails on any rank, the same error on all."""
        return self._gather(fn, lambda result: None)[0]

    def first(self, fn: Callable[[], T]) -> T:
        """What fn returns on rank 0, which alone calls it; if it fails, the same error on all."""
        answer: list[Any] = [None]
        if self.rank == 0:
            try:
                answer = [(fn(), None)]
            except self._told as error:
                answer = [(None, self._problem(error))]
        if self.distributed:
            with self._waiting():
                dist.broadcast_object_list(answer, src=0, group=self.group)
        result, problem = answer[0]
        if problem is not None:
            self._fail({0: problem})
        return result

    def numbers(self, number: int) -> list[int]:
        """A whole number of each rank, by rank: one small collective, without pickles."""
        found = [torch.zeros(1, dtype=torch.int64) for _ in range(self.world_size)]
        with self._waiting():
            dist.all_gather(found, torch.tensor([number]), group=self.group)
        return [int(one) for one in found]

    def threads(self) -> int:
        """How many processors of this host are this rank's."""
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        return max(1, cores // self.hosts.count(self.hosts[self.rank]))

    @contextmanager
    def guard(self) -> Iterator[None]:
        """Whatever goes wrong inside becomes the ranks' error, here and on the ranks that wait.

        The failed rank leaves the group, which is what ends the others' waiting.
        """
        try:
            yield
        except BaseException as error:
            failures = _dcp_failures(error)
            if self._shared is not None and (error is self._shared or failures):
                raise self._shared from None  # all() or first() has told it to every rank, if inside of DCP
            if failures and not self._cut_off():  # DCP has told it to every rank
                told = {rank: self._words(one) for rank, one in failures}
                text = self._join(told) + self.consequence
            else:
                cause = next((one for _, one in failures), error)
                what = (
                    str(cause)
                    if isinstance(cause, LostRank)
                    else f"failed, or lost a rank that did: {self._words(cause)}"
                )
                text = self._publish(
                    f"{self._prefix()}rank {self.rank} {what}{self._hint()}{self.consequence}"
                )
            self.close(error)
            if not isinstance(error, Exception) and not failures:
                raise
            raise self.error(text) from error

    def check_group(self) -> None:
        """To be called before DCP, which without a process group would take each rank for the only one."""
        if self._cut_off():
            raise RuntimeError("there is no process group any more")

    def close(self, error: BaseException | None = None) -> None:
        """Close this rank's connections, which is what tells the others. The next call makes new ones.

        Args:
            error: what this rank fails with: the frames of its traceback hold the group, too.
        """
        if self.group is None:
            return
        group, self.group = self.group, None
        # The sockets close when the last reference to the group goes.
        causes = [] if error is None else [error, *(one for _, one in _dcp_failures(error))]
        for one in causes:
            cause: BaseException | None = one
            while cause is not None:
                traceback.clear_frames(cause.__traceback__)
                cause = cause.__cause__ or cause.__context__
        if group in process_groups():  # else the program has destroyed all its groups
            dist.destroy_process_group(group)
        del group
        if error is not None:
            gc.collect()  # frames and exceptions refer to each other

    def _gather(self, fn: Callable[[], T], send: Callable[[T], Any]) -> tuple[T, list[Any]]:
        result, sent, problem = None, None, None
        try:
            result = fn()
            sent = send(result)
        except self._told as error:
            problem = self._problem(error)
        answers: list[Any] = [(sent, problem)]
        if self.distributed:
            answers = [None] * self.world_size
            with self._waiting():
                dist.all_gather_object(answers, (sent, problem), group=self.group)
        if problems := {rank: problem for rank, (_, problem) in enumerate(answers) if problem}:
            self._fail(problems)
        return result, [sent for sent, _ in answers]  # type: ignore[return-value]

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            if self.group is None:
                raise
            raise LostRank(
                f"heard nothing from another rank within {self._collective_s:g} s, or that rank is gone "
                f"({error})"
            ) from error

    def _fail(self, problems: dict[int, tuple[str, str]]) -> NoReturn:
        """Raise what every rank raises now."""
        texts = {rank: text for rank, (text, _) in problems.items()}
        kind = self._kind(name for _, name in problems.values())
        self._shared = kind(self._join(texts) + self.consequence)
        raise self._shared

    def _problem(self, error: BaseException) -> tuple[str, str]:
        """What the other ranks are told: the text, and the name of the class."""
        return self._words(error), type(error).__name__

    def _kind(self, names: Iterable[str]) -> type[Exception]:
        """The class that all these names are of: a subclass from the module of self.error, or self.error."""
        kinds = {one.__name__: one for one in self.error.__subclasses__()}
        found = {kinds.get(name, self.error) for name in names}
        only = found.pop() if len(found) == 1 else self.error
        return only if only.__module__ == self.error.__module__ else self.error

    def _join(self, problems: dict[int, str]) -> str:
        """Several ranks' problems in one text."""
        texts = [[problems[rank]] if rank in problems else [] for rank in range(self.world_size)]
        return self._prefix() + "\n".join(by_ranks(texts))

    def _prefix(self) -> str:
        return f"{self.action}: " if self.action else ""

    def _words(self, error: BaseException) -> str:
        if isinstance(error, FileNotFoundError) and error.filename:
            return f"{error.filename}: expected a file or directory, found none (deleted by another program?)"
        return str(error) if isinstance(error, self.error) else f"{type(error).__name__}: {error}"

    def _cut_off(self) -> bool:
        """Has the program destroyed the process group meanwhile?"""
        return self.distributed and not dist.is_initialized()

    def _hint(self) -> str:
        if self._cut_off():
            return ". The process group was destroyed meanwhile: call .wait() before destroy_process_group()"
        if self.in_background:  # a rank that destroyed its group looks like one that died
            return ". If it has only ended too early: call .wait() before destroy_process_group()"
        return ""

    def _publish(self, text: str) -> str:
        """The failure that was published first by any rank; this one when it is the first."""
        if not self.distributed:
            return text
        try:
            store, key = library_store(self._topic), f"{self._round}/failure"
            if store.add(f"{key}s", 1) == 1:
                store.set(key, text)
            return store.get(key).decode() if wait_for(store, [key], 1.0) else text
        except Exception:  # the store has gone with its rank
            return text

    # ---- entering together: see `agree` ----

    def _enter(self, facts: Callable[[], dict[str, Any]], wait_s: float) -> None:
        try:
            mine: dict[str, Any] = {"facts": {"call": self.action, **facts()}, "host": socket.gethostname()}
        except Exception as error:
            mine = {"problem": self._problem(error)}
        if self.distributed:
            try:
                outcome = self._compare_in_store(json.dumps(mine), wait_s)
            except Exception as error:
                raise self.error(
                    f"{self.action}: rank {self.rank} cannot reach the process group's store (has the rank "
                    f"or the host that keeps it gone?): {self._words(error)}"
                ) from error
        else:
            outcome = self._compare([mine])
        if "problem" in outcome:
            raise self._kind(outcome.get("kinds", ()))(outcome["problem"])
        self.facts = [answer["facts"] for answer in outcome["answers"]]
        self.hosts = [answer["host"] for answer in outcome["answers"]]

    def _compare_in_store(self, mine: str, wait_s: float) -> dict[str, Any]:
        """Write this rank's facts into the store, and read the outcome of comparing those of all ranks.

        Comparisons are numbered rounds. The rank that comes last, or whose wait ends first, decides a round,
        once for all. A rank that finds its round decided without it goes on to the next, so that ranks find
        together again after one of them has entered a call alone.
        """
        store, connection = library_store(self._topic), _connection(self._topic)
        number = connection.next_round
        while store.check([f"{number}/outcome"]) or store.add(f"{number}/came/{self.rank}", 1) > 1:
            number += 1
        self._round, connection.next_round = number, number + 1
        key = f"{number}/outcome"

        store.set(f"{number}/answer/{self.rank}", mine)
        last = store.add(f"{number}/count", 1) == self.world_size
        if (last or not wait_for(store, [key], wait_s)) and store.add(f"{number}/deciders", 1) == 1:
            everyone = range(self.world_size)
            missing = [rank for rank in everyone if not store.check([f"{number}/answer/{rank}"])]
            if missing:
                here = [rank for rank in everyone if rank not in missing]
                outcome = {
                    "problem": f"{self.action}: expected all {self.world_size} ranks to enter it, found only "
                    f"{rank_names(here)} after {wait_s:g} s; missing: {rank_names(missing)}. Call it on "
                    "every rank: not under `if rank == 0`, and not under a condition that each rank decides "
                    "for itself."
                }
            else:
                answers = [store.get(f"{number}/answer/{rank}") for rank in everyone]
                outcome = self._compare([json.loads(answer) for answer in answers])
            store.set(key, json.dumps(outcome))
        # The deciding rank publishes the outcome at once, however short wait_s is, unless it dies.
        if not wait_for(store, [key], max(wait_s, _DECISION_S)):
            raise TimeoutError(f"no outcome of round {number} after {max(wait_s, _DECISION_S):g} s")
        return json.loads(store.get(key))

    def _compare(self, answers: list[dict[str, Any]]) -> dict[str, Any]:
        problems = {rank: answer["problem"] for rank, answer in enumerate(answers) if "problem" in answer}
        if problems:
            texts = {rank: text for rank, (text, _) in problems.items()}
            return {"problem": self._join(texts), "kinds": [kind for _, kind in problems.values()]}
        for name in answers[0]["facts"]:
            if name.startswith("_"):
                continue
            by_value: dict[str, list[int]] = {}
            for rank, answer in enumerate(answers):
                by_value.setdefault(json.dumps(answer["facts"].get(name)), []).append(rank)
            if len(by_value) > 1:
                found = "; ".join(f"{rank_names(ranks)}: {value}" for value, ranks in by_value.items())
                return {
                    "problem": f"{self.action}: expected the same {name} on all ranks, found {found}. Decide "
                    "on one rank and broadcast the decision."
                }
        return {"answers": answers}

    def _connect(self, wait_s: float, collective_s: float) -> None:
        """Make the ranks' own group, or take that of the call before: all ranks are known to be here."""
        self._collective_s = collective_s
        connection = _connection(self._topic)
        self.group = connection.group()
        if self.group is None or self.group not in process_groups():
            limit = timedelta(seconds=max(wait_s, _DECISION_S))
            made = dist.new_group(backend="gloo", timeout=limit)
            assert isinstance(made, dist.ProcessGroup)
            connection.group, self.group = weakref.ref(made), made
            # Gloo connects a rank before its peers are done: one that closes at once would cut them off.
            self.numbers(0)
            set_group_timeout(made, collective_s)


def agree(
    action: str,
    facts: Callable[[], dict[str, Any]],
    *,
    error: type[Exception],
    topic: str,
    wait_s: float = WAIT_S,
    collective_s: float | None = None,
) -> Ranks:
    """All ranks enter and want the same; or all raise the same error.

    Args:
        action: the name of the caller, for the error.
        facts: what must be the same on all ranks (values that JSON can hold). Keys that begin with "_" may
            differ: they are only passed on, in `Ranks.facts`. An exception in it is told to all ranks.
        error: the class of the error.
        topic: calls of one topic share a group of their own, from call to call until `Ranks.close`. So they
            must not overlap; calls of two topics may.
        wait_s: seconds to wait for the other ranks to enter.
        collective_s: seconds that a rank may come later than the others to a collective after that; None for
            wait_s.

    Returns:
        The ranks, connected.

    Raises:
        error: a rank did not come, the facts differ, or facts failed on some rank.
    """
    ranks = Ranks(action, error, topic=topic)
    ranks._enter(facts, wait_s)
    if ranks.distributed:
        with ranks.guard():
            ranks._connect(wait_s, wait_s if collective_s is None else collective_s)
    return ranks


class _Connection:
    """What lasts from call to call of one topic within a default process group."""

    def __init__(self, world: Any) -> None:
        # Weak: torch.distributed alone decides how long a group, with its sockets, lives.
        self.world: Callable[[], Any] = weakref.ref(world)
        self.group: Callable[[], dist.ProcessGroup | None] = lambda: None
        self.next_round = 0


_connections: dict[str, _Connection] = {}


def _connection(topic: str) -> _Connection:
    known = _connections.get(topic)
    if known is None or known.world() is not dist.group.WORLD:
        known = _connections[topic] = _Connection(dist.group.WORLD)
    return known


def _dcp_failures(error: BaseException) -> list[tuple[int, BaseException]]:
    """What failed inside of torch.distributed.checkpoint, by rank; [] for another exception."""
    if isinstance(error, Exception):
        return []
    from torch.distributed.checkpoint.api import CheckpointException  # a BaseException; its package is large

    failures = error.failures if isinstance(error, CheckpointException) else {}
    return [(rank, one[0] if isinstance(one, tuple) else one) for rank, one in failures.items()]


# ---- words -----------------------------------------------------------------------------------------


def rank_names(ranks: Sequence[int]) -> str:
    """Such as "rank 3", "ranks 0, 1", "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 56 more"."""
    shown = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"


def by_ranks(texts: Sequence[Iterable[str]]) -> list[str]:
    """The texts of each rank, by rank: each once, with the ranks that it is from unless these are all."""
    ranks: dict[str, list[int]] = {}
    for rank, of_rank in enumerate(texts):
        for text in of_rank:
            ranks.setdefault(text, []).append(rank)
    return [text if len(who) == len(texts) else f"{rank_names(who)}: {text}" for text, who in ranks.items()]


def fingerprint(lines: list[str]) -> str:
    """A short name for a long list, to compare it between ranks."""
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]
