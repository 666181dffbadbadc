"""Search for the batch size with the most samples per second, without retries or running out of memory."""

import html
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from fsdp_utils.distributed.agreement import Ranks, agree
from fsdp_utils.distributed.failures import (
    CannotRecover,
    Gradients,
    PeerFailed,
    is_out_of_memory,
    recover,
    stop_together,
)
from fsdp_utils.distributed.identity import get_rank
from fsdp_utils.memory.device_stats import GIB, DeviceStats, device_stats

__all__ = ["BatchSizeSearch", "Trial", "find_batch_size"]

_NEARLY = 0.7  # of the fastest speed: a trial's first measurement may be that far from the truth
_REPETITIONS = 3
_MARGIN = 0.02  # less is not worth a smaller batch size


@dataclass(frozen=True)
class Trial:
    """The measurement of one batch size.

    Args:
        batch_size: samples per step and rank.
        outcome: "ok", "retries" or "OOM".
        samples_per_s: of all ranks together; None after OOM. Where the trial was repeated, of the fastest.
        seconds_per_step: on the slowest rank; None after OOM.
        max_reserved_gib: on the fullest rank; None where the device does not say.
        num_alloc_retries: on all ranks together; None where the device does not count them.
    """

    batch_size: int
    outcome: str
    samples_per_s: float | None = None
    seconds_per_step: float | None = None
    max_reserved_gib: float | None = None
    num_alloc_retries: int | None = None


@dataclass(frozen=True)
class BatchSizeSearch:
    """The result of `find_batch_size`.

    Args:
        best: the batch size per rank that trained the most samples per second without retries; of several
            that are equally fast, as far as can be measured, the largest. None when there were retries, or
            no memory, at every batch size that was tried.
        trials: every batch size that was tried, in the order in which it was.
    """

    best: int | None
    trials: tuple[Trial, ...]

    def __str__(self) -> str:
        rows = [_HEAD, *(self._row(trial) for trial in sorted(self.trials, key=lambda t: t.batch_size))]
        widths = [max(len(row[column]) for row in rows) for column in range(len(_HEAD))]
        lines = [
            "  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True)) for row in rows
        ]
        return "\n".join([*lines, self._conclusion()])

    def _repr_html_(self) -> str:
        head = "".join(f"<th>{html.escape(name)}</th>" for name in _HEAD)
        rows = ""
        for trial in sorted(self.trials, key=lambda t: t.batch_size):
            cells = "".join(f"<td>{html.escape(cell)}</td>" for cell in self._row(trial))
            style = ' style="font-weight:bold"' if trial.batch_size == self.best else ""
            rows += f"<tr{style}>{cells}</tr>"
        return f"<table><tr>{head}</tr>{rows}</table><div>{html.escape(self._conclusion())}</div>"

    def _row(self, trial: Trial) -> tuple[str, ...]:
        def show(value: float | None, digits: int) -> str:
            return "-" if value is None else f"{value:.{digits}f}"

        return (
            str(trial.batch_size),
            show(trial.samples_per_s, 2),
            show(trial.seconds_per_step, 4),
            show(trial.max_reserved_gib, 2),
            show(trial.num_alloc_retries, 0),
            "best" if trial.batch_size == self.best else trial.outcome,
        )

    def _conclusion(self) -> str:
        if self.best is None:
            return "Best: none. Every batch size that was tried had retries or ran out of memory."
        return f"Best: {self.best} per rank."


_HEAD = ("batch size", "samples/s", "s/step", "reserved GiB", "retries", "")


def find_batch_size(
    step: Callable[[int], object],
    *,
    start: int = 1,
    limit: int | None = None,
    steps: int = 3,
    device: torch.device | str | DeviceStats | None = None,
    timeout: float = 300.0,
) -> BatchSizeSearch:
    """Search for the batch size with the most samples per second, without retries or running out of memory.

    NOTE: call it on ALL ranks. It doubles the batch size until a trial runs out of memory or has retries,
    then halves the distance between the largest that succeeded and the smallest that failed. A trial that
    runs out of memory on one rank counts as such on all. After it the state of FSDP2's models is reset, the
    gradients that the trial has made or changed are dropped, the cache is emptied, and the search goes on.

    Speeds vary from trial to trial. Where a larger batch size is nearly as fast as the fastest, the trials of
    both are repeated, and the larger one is the best unless it is slower by more than the speeds vary.

    The steps are real: they train. Call it before the weights are loaded, or load them again afterwards.

    Args:
        step: trains one step on this many samples, on this rank: zero_grad, forward, backward, optimizer.
        start: the first batch size, per rank.
        limit: the largest that may be tried, per rank. Required on the CPU, where the system ends a process
            that takes too much memory, without an exception.
        steps: timed steps per trial; two untimed ones come before. Retries are counted from the second on.
        device: as for `Memory_Maximizer`.
        timeout: seconds that the ranks wait for each other at most, each time.

    Returns:
        The best batch size and the table of trials, the same on every rank.

    Raises:
        ValueError: the arguments make no sense, or differ between ranks.
        RuntimeError: the search cannot continue; the text holds what it has found so far. A rank does not
            answer. Or a model cannot be reset: FSDP1, and FSDP2 in a torch without
            `FSDPModule.reset_iter_state` (DDP raises by itself, in its next step). Or one of several ranks
            ran out of memory in a timed step, after untimed ones that succeeded; its peers may then wait in
            a collective until it ends, or until the process group's own timeout.
        Exception: what `step` raises, other than for lack of memory (torch.OutOfMemoryError, MemoryError, and
            the RuntimeErrors of CUDA, its libraries and the CPU's allocator that say so). Other ranks raise
            a RuntimeError that names the rank.

    Example::

        def step(batch_size):
            optimizer.zero_grad()
            model(random_batch(batch_size)).mean().backward()
            optimizer.step()

        search = find_batch_size(step, limit=8)
        print(search)
        batch_size = search.best
    """
    stats = device_stats(device)
    whole = all(
        isinstance(n, int) and not isinstance(n, bool) for n in (start, steps, limit) if n is not None
    )
    if not whole or start < 1 or steps < 1 or (limit is not None and limit < start):
        raise ValueError(
            f"find_batch_size: expected whole numbers with 1 <= start <= limit and steps of at least 1, "
            f"found start={start!r}, limit={limit!r}, steps={steps!r}"
        )
    if stats.kind == "process" and limit is None:
        raise ValueError(
            "find_batch_size: on the CPU pass limit=: the system kills a process that uses too much memory"
        )
    trials: list[Trial] = []
    ranks = bar = None
    try:
        ranks = agree(
            "find_batch_size",
            lambda: {"_asked": (start, limit, steps)},
            error=CannotRecover,
            topic="batch_size",
            wait_s=timeout,
        )
        ranks.consequence = ". Every rank must take part, and issue the same collectives."
        asked = [tuple(facts["_asked"]) for facts in ranks.facts]
        if len(set(asked)) > 1:
            raise ValueError(f"find_batch_size: the ranks ask for different (start, limit, steps): {asked}")
        bar = _progress_bar()
        fits, fails, size = 0, None, start
        while size is not None:
            trial = _try(step, size, steps, stats, ranks)
            trials.append(trial)
            if bar is not None:
                bar.set_postfix_str(f"batch size {size}: {trial.outcome}")
                bar.update()
            if trial.outcome == "ok":
                fits = size
            else:
                fails = size
            size = _next(fits, fails, limit)
        margin = _MARGIN
        if len(contenders := _contenders(trials)) > 1:
            margin = _repeat(trials, contenders, lambda size: _try(step, size, steps, stats, ranks))
    except CannotRecover as error:
        text = f"find_batch_size: {str(error).removeprefix('find_batch_size: ')}"
        raise RuntimeError(f"{text} Found so far:\n{_search(trials)}") from error
    finally:
        if bar is not None:
            bar.close()
        if ranks is not None:
            ranks.close()
    return _search(trials, margin)


def _search(trials: list[Trial], margin: float = _MARGIN) -> BatchSizeSearch:
    """The largest batch size whose speed is within the margin of the fastest one's."""
    ok = [trial for trial in trials if trial.outcome == "ok"]
    fastest = max((trial.samples_per_s or 0.0 for trial in ok), default=0.0)
    equal = [t.batch_size for t in ok if (t.samples_per_s or 0.0) >= (1 - margin) * fastest]
    return BatchSizeSearch(max(equal, default=None), tuple(trials))


def _contenders(trials: list[Trial]) -> list[int]:
    """The fastest batch size, and larger ones that are nearly as fast."""
    ok = [trial for trial in trials if trial.outcome == "ok"]
    if not ok:
        return []
    fastest = max(ok, key=lambda trial: trial.samples_per_s or 0.0)
    bound = _NEARLY * (fastest.samples_per_s or 0.0)
    return [
        trial.batch_size
        for trial in ok
        if trial.batch_size >= fastest.batch_size and (trial.samples_per_s or 0.0) >= bound
    ]


def _repeat(trials: list[Trial], sizes: list[int], run: Callable[[int], Trial]) -> float:
    """Repeat the trials of these sizes, in turns. Returns the fraction by which speeds vary.

    Other work on the machine only makes a trial slower. So the fastest repetition counts, and speeds vary by
    the distance of the median repetition from it.
    """
    place = {trial.batch_size: i for i, trial in enumerate(trials)}
    speeds = {size: [trials[place[size]].samples_per_s or 0.0] for size in sizes}
    for _ in range(_REPETITIONS):
        for size in sizes:
            known = trials[place[size]]
            if known.outcome != "ok":
                continue
            found = run(size)
            if found.outcome != "ok":  # it is at the limit of the memory, and does not always fit
                trials[place[size]] = found
                continue
            if (found.samples_per_s or 0.0) > max(speeds[size]):
                trials[place[size]] = found
            speeds[size].append(found.samples_per_s or 0.0)
    variation = max(1 - median(found) / max(found) for found in speeds.values())
    return min(max(variation, _MARGIN), 1 - _NEARLY)


def _next(fits: int, fails: int | None, limit: int | None) -> int | None:
    """The batch size to try next; None when none is left between `fits` and `fails`."""
    if fails is None:
        larger = 2 * fits if limit is None else min(2 * fits, limit)
        return larger if larger > fits else None
    return (fits + fails) // 2 if fails - fits > 1 else None


def _try(step: Callable[[int], object], size: int, steps: int, stats: DeviceStats, ranks: Ranks) -> Trial:
    stats.empty_cache()  # blocks that trials of other sizes left in the cache would not fit this one
    before = Gradients()
    try:
        with stop_together(ranks):
            step(size)  # fills the allocator's cache
            stats.reset()
            step(size)  # from the second step on, memory is as in all later ones
    except PeerFailed as error:
        if not error.out_of_memory:
            raise RuntimeError(f"find_batch_size: step({size}): {error}") from None
        return _out_of_memory(size, error, stats, before)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return _out_of_memory(size, error, stats, before)

    try:
        stats.synchronize()
        begun = stats.now()
        for _ in range(steps):
            step(size)
        stats.synchronize()
        mine = stats.now() - begun, stats.read()
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        if ranks.world_size > 1:
            raise CannotRecover(
                f"out of memory at batch size {size} in a timed step, though two like it went well: "
                "timed steps do not exchange failures, so the ranks are now at different places."
            ) from error
        return _out_of_memory(size, error, stats, before)

    with ranks.guard():
        all_ranks: list[Any] = ranks.all(lambda: mine)
    seconds = max(rank_seconds for rank_seconds, _ in all_ranks)
    reserved = [reading.reserved for _, reading in all_ranks]
    retries = [reading.retries for _, reading in all_ranks]
    return Trial(
        batch_size=size,
        outcome="retries" if any(retries) else "ok",
        samples_per_s=ranks.world_size * size * steps / seconds,
        seconds_per_step=seconds / steps,
        max_reserved_gib=None if None in reserved else max(reserved) / GIB,
        num_alloc_retries=None if None in retries else sum(retries),
    )


def _out_of_memory(size: int, error: BaseException, stats: DeviceStats, before: Gradients) -> Trial:
    recover(error, before)
    stats.empty_cache()
    return Trial(size, "OOM")


def _progress_bar() -> Any:
    """A bar on rank 0, where tqdm is installed and somebody watches (the output is a terminal)."""
    if get_rank() != 0:
        return None
    try:
        from tqdm import tqdm
    except ImportError:
        return None
    return tqdm(desc="find_batch_size", unit=" trials", disable=None, leave=False)
