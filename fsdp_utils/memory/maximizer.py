"""Measures how full the device is while it trains, and whether allocations had to be retried.

A device that is almost full still runs, but slower: when an allocation fails, the caching allocator frees
its cached blocks and asks the device again (a retry). Nothing reports it unless it is counted.
"""

from types import TracebackType

import torch

from fsdp_utils.distributed.agreement import agree
from fsdp_utils.distributed.identity import get_world_size
from fsdp_utils.memory.device_stats import DeviceStats, count_since, device_stats
from fsdp_utils.memory.report import MemoryReport, RankMemory, Step

_WAIT_S = 10.0  # how long stop() waits for the other ranks


class Memory_Maximizer:
    """Measures the memory that training uses on every rank, and the allocations that were retried.

    Create it, `start()` before the first step, `update()` after each, `stop()` after the last; or use it as
    a context manager, which starts and stops. Use it on all ranks. Where one does not come to its stop(), the
    others wait for 10 seconds, and each reports its own memory and says so.

    It resets the device's peak statistics, which belong to the whole process: read peaks from the report, not
    from `torch.cuda.max_memory_allocated()`. Several may measure at the same time, such as one for each step
    inside one for the epoch: each has its own peaks and counts.

    Args:
        device: what to measure; None for the current accelerator, or the CPU where there is none. On the CPU
            it is the resident memory of the process. Also anything with the methods of
            `fsdp_utils.memory.DeviceStats`.
        verbose: print the report at stop(), on rank 0; on each rank that finds itself alone.

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
        self, device: torch.device | str | DeviceStats | None = None, *, verbose: bool = True
    ) -> None:
        self.report: MemoryReport | None = None  # of the last stop()
        self._device = device
        self._verbose = verbose
        self._stats: DeviceStats | None = None  # while it measures

    def start(self) -> None:
        """Begin to measure: nothing from before is counted."""
        # Not when created: only now is it certain which device is this rank's and whether there is a group.
        self._stats = device_stats(self._device)
        self._steps: list[Step] = []
        self._stats.synchronize()
        self._before = self._stats.read()
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
        stats = self._measuring("update")
        self._steps.append(self._step(stats, samples))

    def stop(self) -> MemoryReport:
        """End the measurement, gather the ranks' results, and print the report.

        Returns:
            The report over all ranks. `rank` and `history` are this rank's, the rest is the same on all. A
            second call returns the same report.

        Raises:
            RuntimeError: start() was not called before.
        """
        if self._stats is None and self.report is not None:
            return self.report
        return self._finish()

    def __enter__(self) -> "Memory_Maximizer":
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, frames: TracebackType | None
    ) -> None:
        if self._stats is not None:
            self._finish(error)

    def _measuring(self, method: str) -> DeviceStats:
        if self._stats is None:
            raise RuntimeError(
                f"Memory_Maximizer.{method}() before start(): call start() before the first step"
            )
        return self._stats

    def _step(self, stats: DeviceStats, samples: int | None) -> Step:
        before, self._before = self._before, stats.read()
        last, self._last = self._last, stats.now()
        return Step(
            reserved=self._before.reserved,
            allocated=self._before.allocated,
            live=self._before.live,
            retries=count_since(before.retries, self._before.retries),
            ooms=count_since(before.ooms, self._before.ooms),
            seconds=self._last - last,
            samples=samples,
        )

    def _finish(self, error: BaseException | None = None) -> MemoryReport:
        stats = self._measuring("stop")
        self._stats = None
        waiting = stats.now()
        if error is None:
            stats.synchronize()
        # What was still under way belongs to the steps; what the host did since the last update() does not.
        seconds = self._last - self._begun + stats.now() - waiting
        after = self._step(stats, None)  # memory that was used since the last step counts, too
        mine = RankMemory.of(stats, self._steps, after, seconds)
        if error is None:
            ranks, notes = _exchange(mine)
        else:
            # The others may never come to their stop(), and the device may be stuck in a kernel that waits
            # for them: wait for neither.
            ranks, notes = [mine], [f"rank {mine.rank} only: {type(error).__name__} ended it"]
        if stats.remark:
            notes.append(stats.remark)
        self.report = MemoryReport(
            tuple(ranks), get_world_size(), tuple(self._steps), mine.rank, tuple(notes)
        )
        if self._verbose and ranks[0].rank == mine.rank:
            print(self.report)
        return self.report


def _exchange(mine: RankMemory) -> tuple[list[RankMemory], list[str]]:
    """The results of all ranks; where one does not come, this rank's, and a note that says so."""
    try:
        ranks = agree("Memory_Maximizer.stop", dict, error=RuntimeError, topic="memory", wait_s=_WAIT_S)
        with ranks.guard():
            results = ranks.all(lambda: mine)
        ranks.close()
    except RuntimeError as error:
        return [mine], [f"rank {mine.rank} only: {error}"]
    return results, []
