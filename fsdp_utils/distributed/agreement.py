"""Agreement of ranks: a function runs on all of them, and each gets the results, or the same error.

A collective that one rank does not enter blocks until the process group's timeout. So `agree` first lets the
ranks register in the process group's key-value store, where a rank can wait for a limited time and name the
missing ones. After that they exchange results over a separate gloo group: when a rank dies or leaves it, its
connections close and the others notice. torch.distributed alone holds that group, so a rank can always leave.
Traffic grows with the number of ranks and not with its square: texts travel only where ranks fail or differ.
"""

import gc
import hashlib
import json
import os
import time
import traceback
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist

from fsdp_utils.torch_internals.groups import default_store, process_groups, set_group_timeout

T = TypeVar("T")
_Problem = tuple[str, type[Exception]]  # the text of a failure, and the class that all ranks raise

WAIT_S = 30.0  # how long a rank waits for the others to enter the same call
_SLOWEST_POLL_S = 0.05
_CONNECT_S = 5.0  # the least time that ranks have to make their group, and for a collective
_ALL_HERE = "all"  # the outcome of a round, or else the error's text
_SHOWN, _SHOWN_LENGTH = 3, 200  # values that differ, characters of a value
_CURE = ". Decide on one rank and broadcast the decision."

_groups: dict[str, Callable[[], dist.ProcessGroup | None]] = {}  # weak references, by topic


def usable_cores() -> int:
    """Count the processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def has_peers() -> bool:
    """Is there a process group whose ranks can answer? A `fake` group has one real rank."""
    return dist.is_available() and dist.is_initialized() and dist.get_backend() != "fake"


def library_store(part: str) -> dist.Store:
    """Return the process group's store, with the keys of one part of this library."""
    return dist.PrefixStore(f"fsdp_utils/{part}", default_store())


def wait_for(store: dist.Store, keys: Sequence[str], seconds: float) -> bool:
    """Are all of these keys set within that time? Polls: Store.wait would block the store's other users."""
    limit, poll_s = time.monotonic() + seconds, 0.001
    while not (found := store.check(list(keys))) and time.monotonic() < limit:
        time.sleep(poll_s)
        poll_s = min(2 * poll_s, _SLOWEST_POLL_S)
    return found


class LostRank(RuntimeError):
    """A collective of the ranks' group failed: a rank did not answer in time, or has ended."""


class Ranks:
    """The ranks of the default process group, which exchange results and failures.

    `agree` makes one with a separate group for its topic; made directly, it uses the default group. Without a
    process group, with a fake one, and `alone`, this process is the only rank. All ranks raise failures as
    `error`, or as a subclass from its module. Exceptions that are not `told` are raised on their rank alone.
    """

    def __init__(
        self,
        action: str,
        error: type[Exception],
        *,
        topic: str = "",
        told: type[Exception] = Exception,
        alone: bool = False,
    ) -> None:
        self.action = action
        self.error = error
        self.distributed = has_peers() and not alone
        self.rank, self.world_size = (dist.get_rank(), dist.get_world_size()) if self.distributed else (0, 1)
        self.consequence = ""  # what a failure from here on means; added to the error
        self.in_background = False  # whether the program goes on meanwhile, and may end
        self._told = told
        self._topic = topic
        self._is_apart = False  # whether these ranks have a group of their topic
        self._round = 0  # number of this topic's entries in the store
        self._shared: Exception | None = None  # the error that every rank has

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The group of the topic; None for the default group, and once the group was left."""
        return _groups.get(self._topic, lambda: None)() if self._is_apart else None

    def all(self, fn: Callable[[], T]) -> list[T]:
        """Call fn on each rank; returns all results, by rank. If it fails on any, the same error on all."""
        answers = self._gather(self._call(fn))
        self._raise([problem for _, problem in answers])
        return [result for result, _ in answers]

    def each(self, fn: Callable[[], T]) -> T:
        """Call fn on each rank; returns this rank's result. If it fails on any, the same error on all."""
        return self._settle(*self._call(fn))

    def first(self, fn: Callable[[], T]) -> T:
        """Call fn on rank 0; returns its result on every rank. If it fails, the same error on all."""
        result, problem = self._broadcast(self._call(fn) if self.rank == 0 else None)
        self._raise([problem] + [None] * (self.world_size - 1))
        return result

    def same(self, what: str, values: Mapping[str, str], *, cure: str = "") -> None:
        """Check that values, or hashes of them, are equal on all ranks, by name.

        The error says what the values are of, which of them differ, and what to do (cure).
        """
        digest = int(fingerprint([json.dumps(sorted(values.items()))]), 16) - 2**63
        if len(set(self.numbers(digest))) == 1:
            return
        expected: dict[str, str] = self._broadcast(dict(values))
        mine = sorted({name for name, _ in expected.items() ^ values.items()})[:_SHOWN]
        names = sorted(set().union(*self._gather(mine)))[:_SHOWN]
        held = self._gather([_short(values.get(name)) for name in names])
        problems = []
        for name, *found in zip(names, *held, strict=True):
            entry, found = f"{what} {name}".lstrip(), "; ".join(by_ranks([[one] for one in found]))
            problems.append(f"expected the same {entry} on all ranks, found {found}")
        self._fail("\n".join(problems) + cure)

    def numbers(self, number: int) -> list[int]:
        """Gather a whole number of 64 bits of each rank, by rank."""
        if not self.distributed:
            return [number]
        mine = torch.tensor([number], dtype=torch.int64, device="cpu")  # not a default device's
        found = [torch.zeros_like(mine) for _ in range(self.world_size)]
        self._collective(dist.all_gather, found, mine)
        return [int(one) for one in found]

    def threads(self) -> int:
        """This host's processors for each of its ranks (LOCAL_WORLD_SIZE, or all where it isn't set)."""
        return max(1, usable_cores() // int(os.environ.get("LOCAL_WORLD_SIZE", self.world_size)))

    @contextmanager
    def guard(self) -> Iterator[None]:
        """Raise any failure inside on all ranks: the failed rank leaves the group, so the others wake up."""
        try:
            yield
        except BaseException as error:
            if error is self._shared:
                raise
            lost = isinstance(error, LostRank)
            what = str(error) if lost else f"failed, or lost a rank that did: {self._words(error)}"
            if self.in_background:  # a rank that destroyed its group looks like one that died
                what += ". If it has only ended too early: call .wait() before destroy_process_group()"
            text = self._text(f"rank {self.rank} {what}")
            if self.distributed:
                with suppress(Exception):  # the store has gone with its rank; else the first failure counts
                    store = library_store(self._topic)
                    text = store.compare_set(f"{self._round}/failure", "", text).decode()
            self.close(error)
            if isinstance(error, Exception):
                raise self.error(text) from error
            raise

    def close(self, error: BaseException | None = None) -> None:
        """Leave the group of the topic, which the others notice; the frames of an error may hold it, too."""
        group = self.group
        if group is None:
            return
        del _groups[self._topic]
        if group in process_groups():  # else the program has destroyed all its groups
            dist.destroy_process_group(group)
        cause = error
        while cause is not None:
            traceback.clear_frames(cause.__traceback__)
            cause = cause.__cause__ or cause.__context__
        if error is not None:
            gc.collect()  # frames and exceptions refer to each other

    # ---- exchanges ----

    def _call(self, fn: Callable[[], Any]) -> tuple[Any, _Problem | None]:
        try:
            return fn(), None
        except self._told as error:
            known = isinstance(error, self.error) and type(error).__module__ == self.error.__module__
            return None, (self._words(error), type(error) if known else self.error)

    def _settle(self, result: T, problem: _Problem | None) -> T:
        if any(self.numbers(problem is not None)):
            self._raise(self._gather(problem))
        return result

    def _gather(self, mine: Any) -> list[Any]:
        answers = [mine] * self.world_size
        if self.distributed:
            self._collective(dist.all_gather_object, answers, mine)
        return answers

    def _broadcast(self, value: Any) -> Any:
        values = [value]
        if self.distributed:
            self._collective(dist.broadcast_object_list, values, src=0)
        return values[0]

    def _collective(self, call: Callable[..., object], *args: Any, **options: Any) -> None:
        begun = time.monotonic()
        try:
            if self._is_apart and self.group is None:
                raise RuntimeError("this rank has left the group")
            call(*args, **options, group=self.group)
        except RuntimeError as error:
            if not self._is_apart:
                raise
            seconds = time.monotonic() - begun
            raise LostRank(
                f"heard nothing from another rank for {seconds:.1f} s: it is late or gone ({error})"
            ) from error

    # ---- errors ----

    def _raise(self, problems: Sequence[_Problem | None]) -> None:
        """Raise the problems of the ranks, if there are any, as one error."""
        kinds = {problem[1] for problem in problems if problem}
        if kinds:
            text = "\n".join(by_ranks([[problem[0]] if problem else [] for problem in problems]))
            self._fail(text, kinds.pop() if len(kinds) == 1 else self.error)

    def _fail(self, text: str, kind: type[Exception] | None = None) -> NoReturn:
        """Raise what every rank raises now."""
        self._shared = (kind or self.error)(self._text(text))
        raise self._shared

    def _text(self, text: str) -> str:
        return (f"{self.action}: " if self.action else "") + text + self.consequence

    def _words(self, error: BaseException) -> str:
        return str(error) if isinstance(error, self.error) else f"{type(error).__name__}: {error}"

    # ---- entering together: see `agree` ----

    def _enter(self, wait_s: float) -> None:
        """Wait for all ranks; those that came raise the same error where some did not.

        The rank that comes last, or whose wait ends first, decides the round for all. A rank that finds its
        round decided goes on to the next, so ranks meet again after one has entered a call alone.
        """
        store = library_store(self._topic)
        self._round = store.add(f"round/{self.rank}", 1)
        while store.check([outcome := f"{self._round}/outcome"]):
            self._round = store.add(f"round/{self.rank}", 1)
        if store.add(f"{self._round}/count", 1) == self.world_size:
            store.compare_set(outcome, "", _ALL_HERE)
        elif not wait_for(store, [outcome], wait_s):
            rounds = [store.add(f"round/{rank}", 0) for rank in range(self.world_size)]
            store.compare_set(outcome, "", self._missing(rounds, wait_s))
        found = store.get(outcome).decode()
        if found != _ALL_HERE:
            raise self.error(found)

    def _missing(self, rounds: Sequence[int], wait_s: float) -> str:
        here = [rank for rank, number in enumerate(rounds) if number == self._round]
        if len(here) == self.world_size:
            return _ALL_HERE
        return (
            f"{self.action}: expected all {self.world_size} ranks to enter it, found only {rank_names(here)} "
            f"after {wait_s:g} s; missing: {rank_names([r for r in range(self.world_size) if r not in here])}"
            ". Call it on every rank: not under `if rank == 0` or another condition of one rank."
        )

    def _connect(self, limit_s: float) -> None:
        """Make the group of the topic, or take that of the call before, and limit its collectives."""
        self._is_apart = True
        group: Any = self.group
        if group not in process_groups():
            group = dist.new_group(backend="gloo", timeout=timedelta(seconds=limit_s))
            _groups[self._topic] = weakref.ref(group)
        set_group_timeout(group, limit_s)


def agree(
    action: str,
    facts: Callable[[], dict[str, Any]],
    *,
    error: type[Exception],
    topic: str,
    wait_s: float = WAIT_S,
    collective_s: float | None = None,
) -> Ranks:
    """Have all ranks enter and want the same, or raise the same error on all.

    Args:
        action: the name of the caller, for the error.
        facts: gives what must be the same on all ranks, as values that JSON can hold.
        error: the class of the error.
        topic: calls of one topic share a group until `Ranks.close`, so they must not overlap.
        wait_s: seconds to wait for the other ranks to enter.
        collective_s: seconds to wait for a rank in a collective after that, at least 5; None for wait_s.

    Raises:
        error: a rank did not come, the facts differ, or facts failed on some rank.

    Example::

        ranks = agree("evaluate", lambda: {"step": 3}, error=RuntimeError, topic="evaluate")
        print(ranks.first(lambda: 2.5))  # 2.5
    """
    ranks = Ranks(action, error, topic=topic)
    stated = ranks._call(lambda: {name: json.dumps(value) for name, value in facts().items()})
    if ranks.distributed:
        ranks._enter(wait_s)
    with ranks.guard():
        if ranks.distributed:
            ranks._connect(max(wait_s if collective_s is None else collective_s, _CONNECT_S))
        # These collectives also keep a rank that closes at once from cutting off peers that still connect.
        ranks.action = ""  # in which the ranks may differ, and all raise the same text
        ranks.same("", {"call": json.dumps(action)}, cure=_CURE)
        ranks.action = action
        ranks.same("", ranks._settle(*stated), cure=_CURE)
    return ranks


def rank_names(ranks: Sequence[int]) -> str:
    """Name ranks: "rank 3", "ranks 0, 1", "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 56 more"."""
    shown = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"


def by_ranks(texts: Sequence[Iterable[str]]) -> list[str]:
    """Give each text of the ranks once, with the ranks that it is from unless these are all."""
    ranks: dict[str, list[int]] = {}
    for rank, of_rank in enumerate(texts):
        for text in of_rank:
            ranks.setdefault(text, []).append(rank)
    return [text if len(who) == len(texts) else f"{rank_names(who)}: {text}" for text, who in ranks.items()]


def fingerprint(lines: list[str]) -> str:
    """Hash a long list, to compare it between ranks."""
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def _short(value: str | None) -> str:
    """The value as an error shows it; two long ones that differ stay different."""
    if value is None:
        return "absent"
    return value if len(value) <= _SHOWN_LENGTH else f"{value[:_SHOWN_LENGTH]}… ({fingerprint([value])})"
