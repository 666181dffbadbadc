"""Search for the batch size with the most samples per second."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from fsdp_utils.distributed.agreement import Ranks, agree
from fsdp_utils.memory.device_stats import GIB, DeviceStats, device_stats
from fsdp_utils.memory.recovery import StepFailed, is_out_of_memory, recover, run_together

_TIMED_STEPS = 3
_SETTLED_STEPS = 2  # retries before these may settle; those of a device that is too full recur
_MARGIN = 0.02  # less speed than that is not worth a smaller batch size
_COLLECTIVE_S = 300.0  # how much later than others a rank may come: the first step may compile


@dataclass(frozen=True)
class Trial:
    """The measurement of one batch size.

    Args:
        batch_size: samples per step and rank.
        outcome: "ok", "retries" or "OOM".
        samples_per_s: of all ranks together, in the fastest step; this and all below are None after OOM.
        seconds_per_step: of the fastest step, on the slowest rank.
        max_reserved_gib: on the fullest rank.
        num_alloc_retries: in the last two steps, on all ranks; None where the device does not count them.
    """

    batch_size: int
    outcome: str
    samples_per_s: float | None = None
    seconds_per_step: float | None = None
    max_reserved_gib: float | None = None
    num_alloc_retries: int | None = None


@dataclass(frozen=True)
class BatchSizeSearch:
    """The result of `find_batch_size`: the trials in their order."""

    trials: tuple[Trial, ...]

    @property
    def best(self) -> int | None:
        """The fastest batch size per rank without retries; of several within 2%, the largest; or None."""
        speeds = {
            trial.batch_size: trial.samples_per_s or 0.0 for trial in self.trials if trial.outcome == "ok"
        }
        fastest = max(speeds.values(), default=0.0)
        return max((size for size, speed in speeds.items() if speed >= (1 - _MARGIN) * fastest), default=None)

    def __str__(self) -> str:
        lines = ["batch size  samples/s  s/step  reserved GiB  retries"]
        for one in sorted(self.trials, key=lambda trial: trial.batch_size):
            line = f"{one.batch_size:>10}  "
            if one.samples_per_s is not None:
                retries = "-" if one.num_alloc_retries is None else one.num_alloc_retries
                line += f"{one.samples_per_s:>9.2f}  {one.seconds_per_step:>6.4f}  "
                line += f"{one.max_reserved_gib:>12.2f}  {retries:>7}  "
            lines.append(line + ("best" if one.batch_size == self.best else one.outcome))
        none = "none. Every batch size that was tried had retries or ran out of memory"
        return "\n".join([*lines, f"Best: {none if self.best is None else f'{self.best} per rank'}."])

    __repr__ = __str__


def find_batch_size(
    step: Callable[[int], object],
    *,
    start: int = 1,
    limit: int | None = None,
    device: torch.device | str | DeviceStats | None = None,
) -> BatchSizeSearch:
    """Search for the batch size with the most samples per second, without retries or running out of memory.

    Call it on all ranks. It doubles the batch size until a trial runs out of memory or has retries, then
    halves the distance between the largest that succeeded and the smallest that failed. A trial has two
    untimed steps and three timed ones, of which the fastest counts. Retries count if they recur: in the last
    two steps.

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
        RuntimeError: the search cannot go on; the text holds what was found so far. The arguments differ
            between ranks, a rank does not answer, the step failed on another rank, or a model cannot be
            reset: FSDP1, and FSDP2 before torch 2.13. Or one of several ranks ran out of memory in a timed
            step, after two that went well; its peers then wait for the process group's timeout.
        Exception: what else `step` raises, other than for lack of memory.

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
    if start < 1 or (limit is not None and limit < start):
        raise ValueError(f"find_batch_size: expected 1 <= start <= limit, found start={start}, limit={limit}")
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
            trials.append(_try(step, size, stats, ranks))
            if trials[-1].outcome == "ok":
                good = size
            else:
                bad = size
            size = _next(good, bad, limit)
    except RuntimeError as error:
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
    seconds: list[float] = []
    timed = False
    try:
        run_together(ranks, lambda: step(size))  # fills the allocator's cache
        run_together(ranks, lambda: step(size))  # from the second step on, memory is as in all later ones
        stats.synchronize()
        timed = True  # from here on failures are not exchanged, which would take time
        readings = [stats.read()]
        for _ in range(_TIMED_STEPS):
            begun = stats.now()
            step(size)
            stats.synchronize()
            seconds.append(stats.now() - begun)
            readings.append(stats.read())
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        if timed and ranks.world_size > 1:
            raise StepFailed(
                f"find_batch_size: out of memory at batch size {size} in a timed step, though two like it "
                "went well: timed steps do not exchange failures, so the ranks are now at different places."
            ) from error
        recover(error)
        stats.empty_cache()
        return Trial(size, "OOM")
    before, after = readings[-1 - _SETTLED_STEPS].retries, readings[-1].retries
    retries = None if before is None or after is None else after - before
    most = max(reading.reserved for reading in readings[1:])  # the first peak has what came before
    all_ranks = ranks.all(lambda: (seconds, most, retries))
    times, reserved, retried = zip(*all_ranks, strict=True)
    fastest = min(map(max, zip(*times, strict=True)))  # each step is as slow as its slowest rank
    return Trial(
        batch_size=size,
        outcome="retries" if any(retried) else "ok",
        samples_per_s=ranks.world_size * size / fastest,
        seconds_per_step=fastest,
        max_reserved_gib=max(reserved) / GIB,
        num_alloc_retries=None if None in retried else sum(retried),
    )
