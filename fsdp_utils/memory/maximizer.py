"""Measures how full the device is while it trains, and whether allocations had to be retried.

A device that is almost full still runs, but slower: when an allocation fails, the caching allocator frees
its cached blocks and asks the device again (a retry). Nothing reports it unless it is counted.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from types import TracebackType
from typing import Any

import torch

from fsdp_utils.distributed.agreement import has_peers, library_store, rank_names, wait_for
from fsdp_utils.distributed.identity import get_rank, get_world_size
from fsdp_utils.memory.device_stats import DeviceStats, device_stats
from fsdp_utils.memory.report import MemoryReport, RankMemory, Step

__all__ = ["MemoryReport", "Memory_Maximizer"]

_LATE_S = 1.0  # how long stop() waits for a rank that has not even started


class Memory_Maximizer:
    """Measures the memory that training uses on every rank, and the allocations that were retried.

    Create it, `start()` before the first step, `update()` after each, `stop()` after the last; or use it as
    a context manager, which starts and stops. Best created on all ranks. Where only some create it, the
    report covers those and says so: no rank waits for one that does not take part.

    It resets the device's peak statistics, which belong to the whole process: read peaks from the report, not
    from `torch.cuda.max_memory_allocated()`. Several may measure at the same time, such as one for each step
    inside one for the epoch: each has its own peaks and counts.

    Args:
        device: what to measure; None for the current accelerator, or the CPU where there is none. On the CPU
            it is the resident memory of the process. Also anything with the methods of
            `fsdp_utils.memory.device_stats.DeviceStats`.
        verbose: print the report at stop(), on the first of the ranks that take part.
        timeout: seconds that stop() waits for ranks that have started and not stopped.

    Example::

        mm = Memory_Maximizer()
        mm.start()
        for batch in loader:
            train_step(batch)
            mm.update(samples=len(batch))
        report = mm.stop()
        print(f"{report.max_reserved_gib:.2f} GiB in {report.steps} steps")
        # ... GiB in 4 steps
    """

    def __init__(
        self,
        device: torch.device | str | DeviceStats | None = None,
        *,
        verbose: bool = True,
        timeout: float = 30.0,
    ) -> None:
        self.report: MemoryReport | None = None  # of the last stop()
        self._device = device
        self._verbose = verbose
        self._timeout = timeout
        self._stats: DeviceStats | None = None  # while it measures
        self._steps: list[Step] = []

    def start(self) -> None:
        """Begin to measure. Peaks and counters are reset: nothing from before is counted."""
        # Not when created: only now is it certain which device is this rank's and whether there is a group.
        self._stats = device_stats(self._device)
        self._peers = _Peers()
        self._steps = []
        self._stats.synchronize()
        self._stats.reset()
        self._retries = self._ooms = 0  # as of the last reading
        self._begun = self._last = self._stats.now()

    def update(self, samples: int | None = None) -> None:
        """Record the memory of the step that has ended.

        Seconds are the host's, which runs ahead of an accelerator: those of a single step may be off, their
        sum is not.

        Args:
            samples: how many samples this rank trained on in the step, for the throughput.

        Raises:
            RuntimeError: start() was not called before.
        """
        if self._stats is None:
            raise RuntimeError("Memory_Maximizer.update() before start(): call start() before the first step")
        self._steps.append(self._step(self._stats, samples))

    def stop(self) -> MemoryReport:
        """End the measurement, gather the ranks' results, and print the report.

        Returns:
            The report over the ranks that took part. `rank` and `history` are this rank's, the rest is the
            same on all. Where start() was not called it says that nothing was measured.
        """
        return self._finish(self._timeout)

    def __enter__(self) -> "Memory_Maximizer":
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, frames: TracebackType | None
    ) -> None:
        # After an exception the others may never come to their stop(), and the device may be stuck in a
        # kernel that waits for them: this rank publishes its result, and waits for neither.
        self._finish(self._timeout if error is None else 0.0, synchronize=error is None)

    def _step(self, stats: DeviceStats, samples: int | None) -> Step:
        reading, now = stats.read(), stats.now()
        retries = ooms = None
        if reading.retries is not None and reading.ooms is not None:
            # Where a counter has gone back, somebody else has reset it.
            retries = reading.retries - self._retries if reading.retries >= self._retries else reading.retries
            ooms = reading.ooms - self._ooms if reading.ooms >= self._ooms else reading.ooms
            self._retries, self._ooms = reading.retries, reading.ooms
        seconds, self._last = now - self._last, now
        return Step(reading.reserved, reading.allocated, reading.live, retries, ooms, seconds, samples)

    def _finish(self, timeout: float, *, synchronize: bool = True) -> MemoryReport:
        if self._stats is None:  # not running
            if self.report is None:
                unmeasured = _sum_up(device_stats(self._device), [], [], 0.0)
                self._report([unmeasured], get_world_size(), ["start() was not called: nothing was measured"])
            assert self.report is not None
            return self.report

        stats, self._stats = self._stats, None
        waiting = stats.now()
        if synchronize:
            stats.synchronize()
        # What was still under way belongs to the steps; what the host did since the last update() does not.
        seconds = self._last - self._begun + stats.now() - waiting
        after = self._step(stats, None)  # memory that was used since the last step counts, too
        mine = _sum_up(stats, self._steps, [*self._steps, after], seconds)
        ranks, notes = self._peers.exchange(mine, timeout)
        return self._report(ranks, self._peers.world_size, notes + [stats.remark] * bool(stats.remark))

    def _report(self, ranks: list[RankMemory], world_size: int, notes: list[str]) -> MemoryReport:
        self.report = MemoryReport(tuple(ranks), world_size, tuple(self._steps), get_rank(), tuple(notes))
        if self._verbose and ranks[0].rank == get_rank():
            print(self.report)
        return self.report


def _sum_up(stats: DeviceStats, steps: Sequence[Step], seen: Sequence[Step], seconds: float) -> RankMemory:
    """This rank's result: over its steps, and over all readings from start() to stop()."""
    samples = [step.samples for step in steps if step.samples is not None]
    return RankMemory(
        rank=get_rank(),
        device=stats.name,
        kind=stats.kind,
        total=stats.total,
        reserved=max(_known(step.reserved for step in seen), default=None),
        allocated=max(_known(step.allocated for step in seen), default=None),
        live=steps[-1].live if steps else None,
        retries=sum(_known(step.retries for step in seen)) if seen and seen[-1].retries is not None else None,
        ooms=sum(_known(step.ooms for step in seen)) if seen and seen[-1].ooms is not None else None,
        steps=len(steps),
        steps_with_retries=sum(1 for step in steps if step.retries),
        seconds=seconds,
        samples=sum(samples) if samples and len(samples) == len(steps) else None,
        batch=max(samples, default=None),
    )


def _known(values: Iterable[int | None]) -> list[int]:
    return [value for value in values if value is not None]


class _Peers:
    """Exchanges results with the ranks that measure at the same time, through the process group's store.

    The store and not a collective: a rank that does not take part would make a collective hang, and waiting
    here has a limit of its own. Measurements are numbered, and overlapping ones of several ranks share one.
    """

    def __init__(self) -> None:
        self.world_size = get_world_size()
        self._store: Any = None
        if has_peers():
            self._store = library_store("memory")
            self._number = self._store.add("number", 0)  # of the next measurement
            self._store.set(self._key("started", get_rank()), "")

    def exchange(self, mine: RankMemory, timeout: float) -> tuple[list[RankMemory], list[str]]:
        """The result of each rank that takes part, and notes about those that do not."""
        if self._store is None:
            alone = [f"rank {mine.rank} only: there was no process group, or a fake one, to ask the others"]
            return [mine], alone * (self.world_size > 1)
        try:
            self._store.set(self._key("result", mine.rank), json.dumps(asdict(mine)))
            started = self._wait_for("started", range(self.world_size), min(timeout, _LATE_S))
            done = self._wait_for("result", started, timeout)
            # From here on a start(), on whichever rank, begins another measurement.
            self._store.compare_set("number", str(self._number), str(self._number + 1))
            ranks = [RankMemory(**json.loads(self._store.get(self._key("result", rank)))) for rank in done]
        except RuntimeError as error:  # such as: the process that keeps the store is gone
            return [mine], [
                f"only rank {mine.rank} is in this report: the others cannot be reached ({error})"
            ]
        notes = []
        if absent := sorted({*range(self.world_size)} - {*started}):
            notes.append(f"{rank_names(absent)} took no part: no start() there")
        if silent := sorted({*started} - {*done}):
            notes.append(
                f"{rank_names(silent)} did not come to stop() within {timeout:g} s and so are not included"
            )
        return ranks, notes

    def _wait_for(self, what: str, ranks: Sequence[int], timeout: float) -> list[int]:
        """Those of the ranks that have set the key in time."""
        if wait_for(self._store, [self._key(what, rank) for rank in ranks], timeout):
            return list(ranks)
        return [rank for rank in ranks if self._store.check([self._key(what, rank)])]

    def _key(self, what: str, rank: int) -> str:
        return f"{self._number}/{what}/{rank}"
