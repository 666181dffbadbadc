"""Search for the batch size with the most samples per second, without retries or running out of memory."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from fsdp_utils.distributed.agreement import Ranks, agree
from fsdp_utils.memory.device_stats import GIB, DeviceStats, Reading, count_since, device_stats
from fsdp_utils.memory.recovery import StepFailed, StepOutOfMemory, is_out_of_memory, recover, run_together

_TIMED_STEPS = 3
_MARGIN = 0.02  # less speed than that is not worth a smaller batch size
_COLLECTIVE_S = 300.0  # how much later than others a rank may come: the first step may compile


@dataclass(frozen=True)
class Trial:
    """The measurement of one batch size.

    Args:
        batch_size: samples per step and rank.
        outcome: "ok", "retries" or "OOM".
        samples_per_s: of all ranks together, in the fastest step; None after OOM.
        seconds_per_step: of the fastest step, on the slowest rank; None after OOM.
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
        trials: every batch size that was tried, in the order in which it was.
    """

    trials: tuple[Trial, ...]

    @property
    def best(self) -> int | None:
        """The batch size per rank that trained the most samples per second without retries.

        Of several that are within 2% of the fastest, the largest. None when there were retries, or no
        memory, at every batch size that was tried.
        """
        speeds = {
            trial.batch_size: trial.samples_per_s or 0.0 for trial in self.trials if trial.outcome == "ok"
        }
        fastest = max(speeds.values(), default=0.0)
        return max((size for size, speed in speeds.items() if speed >= (1 - _MARGIN) * fastest), default=None)

    def __str__(self) -> str:
        rows = [("batch size", "samples/s", "s/step", "reserved GiB", "retries", "")]
        rows += [self._row(trial) for trial in sorted(self.trials, key=lambda trial: trial.batch_size)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(map(str.rjust, row, widths)) for row in rows]
        if self.best is None:
            lines.append("Best: none. Every batch size that was tried had retries or ran out of memory.")
        else:
            lines.append(f"Best: {self.best} per rank.")
        return "\n".join(lines)

    __repr__ = __str__

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


def find_batch_size(
    step: Callable[[int], object],
    *,
    start: int = 1,
    limit: int | None = None,
    device: torch.device | str | DeviceStats | None = None,
) -> BatchSizeSearch:
    """Search for the batch size with the most samples per second, without retries or running out of memory.

    NOTE: call it on ALL ranks. It doubles the batch size until a trial runs out of memory or has retries,
    then halves the distance between the largest that succeeded and the smallest that failed. A trial has two
    untimed steps and three timed ones, of which the fastest counts: other work on the machine only makes a
    step slower. Retries are counted from the second step on.

    A trial that runs out of memory on one rank counts as such on all. After it the gradients of every tensor
    in the process are dropped, FSDP2's models are reset, the cache is emptied, and the search goes on.

    The steps are real: they train. Call it before the weights are loaded, or load them again afterwards.

    Args:
        step: trains one step on this many samples, on this rank: zero_grad, forward, backward, optimizer.
        start: the first batch size, per rank.
        limit: the largest that may be tried, per rank. Required on the CPU, where the system ends a process
            that takes too much memory, without an exception.
        device: as for `Memory_Maximizer`.

    Returns:
        The trials and the best batch size, the same on every rank.

    Raises:
        ValueError: start or limit make no sense.
        RuntimeError: the search cannot continue; the text holds what it has found so far. The arguments
            differ between ranks, a rank does not answer within 30 s, or within 300 s in a trial. Or a model
            cannot be reset: FSDP1, and FSDP2 in a torch without `FSDPModule.reset_iter_state` (DDP raises by
            itself, in its next step). Or one of several ranks ran out of memory in a timed step, after
            untimed ones that succeeded; its peers may then wait in a collective until it ends, or until the
            process group's own timeout.
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
    numbers = [start] if limit is None else [start, limit]
    if not all(type(number) is int for number in numbers) or not 1 <= numbers[0] <= numbers[-1]:
        raise ValueError(
            "find_batch_size: expected whole numbers with 1 <= start <= limit, "
            f"found start={start!r}, limit={limit!r}"
        )
    if stats.kind == "process" and limit is None:
        raise ValueError(
            "find_batch_size: on the CPU pass limit=: the system kills a process that uses too much memory"
        )
    ranks = agree(
        "find_batch_size",
        lambda: {"start": start, "limit": limit},
        error=StepFailed,
        topic="batch_size",
        collective_s=_COLLECTIVE_S,
    )
    trials: list[Trial] = []
    try:
        good, bad, size = 0, None, start
        while size is not None:
            trial = _try(step, size, stats, ranks)
            trials.append(trial)
            if trial.outcome == "ok":
                good = size
            else:
                bad = size
            size = _next(good, bad, limit)
    except StepFailed as error:
        found = BatchSizeSearch(tuple(trials))
        raise RuntimeError(f"{error} Found so far:\n{found}") from error
    finally:
        ranks.close()
    return BatchSizeSearch(tuple(trials))


def _next(good: int, bad: int | None, limit: int | None) -> int | None:
    """The batch size to try next; None when none is left between `good` and `bad`."""
    if bad is None:
        larger = 2 * good if limit is None else min(2 * good, limit)
        return larger if larger > good else None
    return (good + bad) // 2 if bad - good > 1 else None


def _try(step: Callable[[int], object], size: int, stats: DeviceStats, ranks: Ranks) -> Trial:
    stats.empty_cache()  # blocks that trials of other sizes left in the cache would not fit this one
    try:
        run_together(ranks, lambda: step(size))  # fills the allocator's cache
        before = stats.read()
        run_together(ranks, lambda: step(size))  # from the second step on, memory is as in all later ones
        seconds, after = _timed(step, size, stats, ranks)
    except StepOutOfMemory as error:
        recover(error)
        stats.empty_cache()
        return Trial(size, "OOM")
    retries = count_since(before.retries, after.retries)
    with ranks.guard():
        all_ranks: list[Any] = ranks.all(lambda: (seconds, after.reserved, retries))
    times, reserved, retried = zip(*all_ranks, strict=True)
    fastest = min(map(max, zip(*times, strict=True)))  # each step is as slow as its slowest rank
    return Trial(
        batch_size=size,
        outcome="retries" if any(retried) else "ok",
        samples_per_s=ranks.world_size * size / fastest,
        seconds_per_step=fastest,
        max_reserved_gib=None if None in reserved else max(reserved) / GIB,
        num_alloc_retries=None if None in retried else sum(retried),
    )


def _timed(
    step: Callable[[int], object], size: int, stats: DeviceStats, ranks: Ranks
) -> tuple[list[float], Reading]:
    """Seconds of each timed step, and the memory after them."""
    seconds = []
    try:
        stats.synchronize()
        for _ in range(_TIMED_STEPS):
            begun = stats.now()
            step(size)
            stats.synchronize()
            seconds.append(stats.now() - begun)
        return seconds, stats.read()
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        if ranks.world_size == 1:
            raise StepOutOfMemory("out of memory") from error
        raise StepFailed(
            f"find_batch_size: out of memory at batch size {size} in a timed step, though two like it went "
            "well: timed steps do not exchange failures, so the ranks are now at different places."
        ) from error
