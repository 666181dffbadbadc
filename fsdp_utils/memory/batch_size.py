"""Search for the batch size with the most samples per second."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from fsdp_utils.distributed.agreement import Ranks, agree
from fsdp_utils.memory.device_stats import GIB, DeviceStats, Reading, device_stats
from fsdp_utils.memory.recovery import StepFailed, is_out_of_memory, recover, run_together

_TIMED_STEPS = 3
_SETTLED_STEPS = 2  # retries before these may settle; those of a device that is too full recur
_MARGIN = 0.02  # less speed than that is not worth a smaller batch size
_COLLECTIVE_S = 300.0  # how much later than others a rank may come: the first step may compile


@dataclass(frozen=True)
class Trial:
    """The measurement of one batch size; after OOM there are no numbers."""

    batch_size: int  # samples per step and rank
    outcome: str  # "ok", "retries" or "OOM"
    samples_per_s: float | None = None  # all ranks together, in the fastest step
    seconds_per_step: float | None = None  # the fastest step, on the slowest rank
    max_reserved_gib: float | None = None  # on the fullest rank
    num_alloc_retries: int | None = None  # in the last two steps, on all ranks; None if not counted


@dataclass(frozen=True)
class BatchSizeSearch:
    """The result of `find_batch_size`: the trials in their order."""

    trials: tuple[Trial, ...]

    @property
    def best(self) -> int | None:
        """The fastest batch size per rank without retries; of several within 2%, the largest; or None."""
        speeds = {one.batch_size: one.samples_per_s or 0.0 for one in self.trials if one.outcome == "ok"}
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

    Call it on all ranks, before the weights are loaded: the steps train. It doubles the batch size until a
    trial fails, then halves the distance between the largest that succeeded and the smallest that failed. Of
    a trial's two untimed and three timed steps the fastest counts, and retries in the last two.

    Out of memory on one rank counts on all. After it the gradients of every tensor in the process are
    dropped, FSDP2's models are reset, the cache is emptied, and the search goes on.

    Args:
        step: trains one step on this many samples, on this rank: zero_grad, forward, backward, optimizer.
        start: the first batch size, per rank.
        limit: the largest that may be tried, per rank. Required on the CPU.
        device: as for `Memory_Maximizer`.

    Returns:
        The trials and the best batch size, the same on every rank.

    Raises:
        ValueError: start or limit make no sense.
        RuntimeError: says what was found so far. The arguments differ between ranks, a rank does not answer,
            the step failed on another rank, or a model cannot be reset: FSDP1, and FSDP2 before torch 2.13.
            Or one of several ranks ran out of memory in a timed step; its peers wait for the group's timeout.
        Exception: what `step` raises, other than for lack of memory.

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
        raise ValueError("find_batch_size: pass limit=: the system kills a CPU process that takes too much")
    wants, waits = {"start": start, "limit": limit}, {"collective_s": _COLLECTIVE_S}
    ranks = agree("find_batch_size", lambda: wants, error=StepFailed, topic="batch_size", **waits)
    trials: list[Trial] = []
    try:
        good, bad, size = 0, None, start
        while size is not None:
            trials.append(_try(step, size, stats, ranks))
            good, bad = (size, bad) if trials[-1].outcome == "ok" else (good, size)
            size = _next(good, bad, limit)
    except RuntimeError as error:
        raise RuntimeError(f"{error} Found so far:\n{BatchSizeSearch(tuple(trials))}") from error
    finally:
        ranks.close()
    return BatchSizeSearch(tuple(trials))


def _next(good: int, bad: int | None, limit: int | None) -> int | None:
    """The batch size to try next; None when none is left between `good` and `bad`."""
    if bad is None:
        larger = min(2 * good, limit or 2 * good)
        return larger if larger > good else None
    return (good + bad) // 2 if bad - good > 1 else None


def _try(step: Callable[[int], object], size: int, stats: DeviceStats, ranks: Ranks) -> Trial:
    stats.empty_cache()  # blocks that trials of other sizes left in the cache would not fit this one
    seconds: list[float] = []
    readings: list[Reading] = []
    try:
        run_together(ranks, lambda: step(size))  # fills the allocator's cache
        run_together(ranks, lambda: step(size))  # from the second step on, memory is as in all later ones
        stats.synchronize()
        readings.append(stats.read())  # from here on failures are not exchanged, which would take time
        for _ in range(_TIMED_STEPS):
            begun = stats.now()
            step(size)
            stats.synchronize()
            seconds.append(stats.now() - begun)
            readings.append(stats.read())
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        if readings and ranks.world_size > 1:
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
    times, reserved, retried = zip(*ranks.all(lambda: (seconds, most, retries)), strict=True)
    fastest = min(map(max, zip(*times, strict=True)))  # each step is as slow as its slowest rank
    return Trial(
        batch_size=size,
        outcome="retries" if any(retried) else "ok",
        samples_per_s=ranks.world_size * size / fastest,
        seconds_per_step=fastest,
        max_reserved_gib=max(reserved) / GIB,
        num_alloc_retries=None if None in retried else sum(retried),
    )
