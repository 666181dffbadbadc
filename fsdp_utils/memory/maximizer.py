"""Measure how full the device is while it trains, and how often it was too full.

The caching allocator then frees its cached blocks and asks the device again (a retry), which is slow.
"""

import torch

from fsdp_utils.distributed.agreement import agree
from fsdp_utils.distributed.identity import get_rank, get_world_size
from fsdp_utils.memory.device_stats import DeviceStats, Reading, device_stats
from fsdp_utils.memory.report import MemoryReport, RankMemory, known_sum

_WAIT_S = 10.0  # how long stop() waits for the other ranks


class Memory_Maximizer:
    """Measure the memory that training uses on every rank, and the allocations that were retried.

    `start()` before the first step, `update()` after each, `stop()` after the last; as a context manager it
    starts and stops. Use it on all ranks. Where one does not come to its stop(), the others wait for 10
    seconds, and each reports its own memory and says so. It resets the device's peak statistics: read peaks
    from the report, not from `torch.cuda.max_memory_allocated()`, and measure one thing at a time.

    Args:
        device: None for the current accelerator, or the CPU where there is none, of which it measures the
            resident memory of the process. Also a `fsdp_utils.memory.DeviceStats`.
        verbose: print the report at stop(), on rank 0; on each rank that finds itself alone.

    Example::

        mm = Memory_Maximizer()
        mm.start()
        for batch in loader:
            train_step(batch)
            mm.update(samples=len(batch))
        report = mm.stop()
        print(f"{report.max_reserved_gib:.2f} GiB in {report.steps} steps")
    """

    def __init__(
        self, device: torch.device | str | DeviceStats | None = None, *, verbose: bool = True
    ) -> None:
        self.report: MemoryReport | None = None  # made by the last stop()
        self._device = device
        self._verbose = verbose
        self._stats: DeviceStats | None = None  # while it measures
        self._steps: list[Reading] = []

    def start(self) -> None:
        """Begin to measure: nothing from before is counted."""
        # Not when created: only now is it certain which device is this rank's and whether there is a group.
        self._stats = device_stats(self._device)
        self._steps = []
        self._stats.synchronize()
        self._before = self._stats.read()
        self._begun = self._last = self._stats.now()

    def update(self, samples: int | None = None) -> None:
        """Record the memory of the step that has ended, and the host's seconds: only their sum is exact.

        Args:
            samples: that this rank trained on in the step, for the throughput.

        Raises:
            RuntimeError: start() was not called before.
        """
        self._steps.append(self._step(samples))

    def stop(self) -> MemoryReport:
        """End the measurement, gather the ranks' results, and print the report.

        Returns:
            The report over all ranks, the same on each but for `history`. A second call returns it again.

        Raises:
            RuntimeError: start() was not called before.
        """
        return self.report if self._stats is None and self.report else self._finish()

    def __enter__(self) -> "Memory_Maximizer":
        self.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, frames: object) -> None:
        if self._stats is not None:
            self._finish(error)

    def _measuring(self) -> DeviceStats:
        if self._stats is None:
            raise RuntimeError("Memory_Maximizer: call start() before the first update(), and before stop()")
        return self._stats

    def _step(self, samples: int | None) -> Reading:
        stats = self._measuring()
        before, self._before = self._before, stats.read()
        last, self._last = self._last, stats.now()
        retries, ooms = self._before.retries, self._before.ooms
        return self._before._replace(
            retries=None if retries is None else retries - (before.retries or 0),
            ooms=None if ooms is None else ooms - (before.ooms or 0),
            seconds=self._last - last,
            samples=samples,
        )

    def _finish(self, error: BaseException | None = None) -> MemoryReport:
        stats, steps, waiting = self._measuring(), self._steps, self._measuring().now()
        if error is None:
            stats.synchronize()
        # What was still under way belongs to the steps; what the host did since the last update() does not.
        seconds = self._last - self._begun + stats.now() - waiting
        seen = [*steps, self._step(None)]  # memory that was used since the last step counts, too
        self._stats = None
        mine = RankMemory(
            rank=get_rank(),
            device=stats.name,
            kind=stats.kind,
            total=stats.total,
            reserved=max(step.reserved for step in seen),
            allocated=max((step.allocated for step in seen if step.allocated is not None), default=None),
            live=steps[-1].live if steps else None,
            retries=known_sum(step.retries for step in seen),
            ooms=known_sum(step.ooms for step in seen),
            steps=len(steps),
            seconds=seconds,
            samples=known_sum(step.samples for step in steps) if steps else None,
        )
        notes, found = [stats.remark] if stats.remark else [], [mine]
        try:
            if error is not None:  # the others may never come to their stop(): wait for nobody
                raise RuntimeError(f"{type(error).__name__} ended it")
            ranks = agree("Memory_Maximizer.stop", dict, error=RuntimeError, topic="memory", wait_s=_WAIT_S)
            with ranks.guard():
                found = ranks.all(lambda: mine)
            ranks.close()
        except RuntimeError as alone:
            notes.insert(0, f"rank {mine.rank} only: {alone}")
        self.report = MemoryReport.of(found, world_size=get_world_size(), history=steps, notes=notes)
        if self._verbose and found[0].rank == mine.rank:
            print(self.report)
        return self.report
