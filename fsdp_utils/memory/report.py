"""The report of `Memory_Maximizer`: memory, retries, throughput and advice over all ranks."""

import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from fsdp_utils._extras import need
from fsdp_utils.memory.device_stats import GIB, Reading

# Below what ran without a retry in the measurement that this tool began with: 93.83% (2022, ViT on A10G)
_FULL = 0.90  # from here on a device counts as full
_FILL_TO = 0.93
_UNEVEN = 0.10  # a share of the device, between the fullest rank and the emptiest
_FRAGMENTED = 0.20, 0.05  # reserved and not allocated: of what is reserved, and of the device


@dataclass(frozen=True)
class RankMemory:
    """The measurement of one rank. Bytes and seconds; None for what is not known."""

    rank: int
    device: str
    kind: str  # as in DeviceStats
    total: int
    reserved: int  # peak
    allocated: int | None  # peak
    live: int | None  # in tensors when the last step was over
    retries: int | None
    ooms: int | None
    steps: int
    seconds: float
    samples: int | None  # None where some step had none

    @property
    def fullness(self) -> float:
        return self.reserved / self.total


@dataclass(frozen=True)
class MemoryReport:
    """The result of `Memory_Maximizer.stop()`, over all ranks that took part.

    Memory is that of the fullest rank, which limits all others; None for what the device does not count.
    """

    device: str
    total_gib: float  # that a rank may use
    world_size: int  # ranks in the process group, whether they took part or not
    steps: int  # the most that a rank took
    seconds: float  # from start() to the end of the last step, on the slowest rank
    samples_per_s: float | None  # all ranks together; None unless every update() had samples
    max_reserved_gib: float  # the most that the allocator held; on CPU the most that was resident
    max_reserved_pct: float  # in percent of total_gib
    max_allocated_gib: float | None  # the most that tensors occupied on any rank
    num_alloc_retries: int | None  # on all ranks together
    num_ooms: int | None  # allocations that failed for good, on all ranks together
    advice: list[str]  # what to do, in words, most urgent first
    notes: list[str]  # remarks about the measurement itself
    worst: RankMemory  # the fullest rank
    ranks: list[RankMemory]  # in the order of ranks
    history: list[Reading]  # the steps of the rank that holds this report

    @classmethod
    def of(cls, ranks: list[RankMemory], **others: Any) -> "MemoryReport":
        """Sum up what the ranks measured; others: world_size, history and notes."""
        worst = max(ranks, key=lambda rank: rank.fullness)
        seconds = max(rank.seconds for rank in ranks)
        samples = known_sum(rank.samples for rank in ranks)
        allocated = [rank.allocated / GIB for rank in ranks if rank.allocated is not None]
        return cls(
            device=worst.device,
            total_gib=worst.total / GIB,
            steps=max(rank.steps for rank in ranks),
            seconds=seconds,
            samples_per_s=samples / seconds if samples is not None and seconds else None,
            max_reserved_gib=worst.reserved / GIB,
            max_reserved_pct=100 * worst.fullness,
            max_allocated_gib=max(allocated, default=None),
            num_alloc_retries=known_sum(rank.retries for rank in ranks),
            num_ooms=known_sum(rank.ooms for rank in ranks),
            advice=_advise(ranks, worst),
            worst=worst,
            ranks=ranks,
            **others,
        )

    def to_dict(self) -> dict[str, Any]:
        """The numbers for a log, without the history: plain values that json can write."""
        return {name: value for name, value in asdict(self).items() if name != "history"}

    def __str__(self) -> str:
        among = f", {len(self.ranks)} of {self.world_size} ranks" if self.world_size > 1 else ""
        unknown = "not applicable: the CPU has no caching allocator" if self._on_cpu else "not known"
        rows = {
            self._held: f"{self.max_reserved_gib:.2f} GiB = {self.max_reserved_pct:.1f}% of "
            f"{self.total_gib:.2f} GiB"
            + (f" on rank {self.worst.rank}, the fullest" if len(self.ranks) > 1 else ""),
            "allocated": None if self.max_allocated_gib is None else f"{self.max_allocated_gib:.2f} GiB",
            "retries": unknown if self.num_alloc_retries is None else self.num_alloc_retries,
            "OOMs": unknown if self.num_ooms is None else self.num_ooms,
            "throughput": self._throughput(),
        }
        lines = [f"Memory over {self.steps} step{'' if self.steps == 1 else 's'}{among} ({self.device})"]
        lines += [f"  {name:<10}  {value}" for name, value in rows.items() if value is not None]
        lines += [f"  note: {note}" for note in self.notes]
        return "\n".join(lines + [f"  -> {advice}" for advice in self.advice])

    __repr__ = __str__

    def plot(self) -> Any:
        """Plot the memory of each step of this rank, retries marked, and the throughput: a matplotlib Figure.

        Raises:
            ModuleNotFoundError: matplotlib is not installed; says how to install it.
        """
        need("matplotlib", "notebooks")
        import matplotlib.pyplot as plt  # here: only who plots needs it

        figure, (memory, speed) = plt.subplots(1, 2, figsize=(10, 3.2), layout="constrained")
        history, steps = self.history, range(1, len(self.history) + 1)
        memory.plot(steps, [one.reserved / GIB for one in history], marker=".", label=self._held)
        if not self._on_cpu:
            memory.plot(steps, [(one.allocated or 0) / GIB for one in history], marker=".", label="allocated")
            memory.axhline(self.total_gib, color="black", linestyle="--", label="device")
        with_retries = [number for number, one in enumerate(history, 1) if one.retries]
        for number in with_retries:
            memory.axvline(number, color="tab:red", alpha=0.6)
        title = f"{len(with_retries)} steps with retries (red)"
        memory.set(xlabel="step", ylabel="GiB", title=title, ylim=(0, None))
        memory.legend()
        speeds, unit = [one.seconds for one in history], "seconds"
        if self.samples_per_s is not None:
            speeds, unit = [(one.samples or 0) / one.seconds for one in history], "samples/s"
        speed.plot(steps, speeds, marker=".", color="tab:green")
        speed.set(xlabel="step", ylabel=unit, title="each step", ylim=(0, None))
        plt.close(figure)  # a notebook would show it a second time
        return figure

    @property
    def _on_cpu(self) -> bool:
        return self.worst.kind == "process"

    @property
    def _held(self) -> str:
        return "resident" if self._on_cpu else "reserved"

    def _throughput(self) -> str:
        if not self.steps:
            return "not known: no step was counted"
        seconds = f"{self.seconds / self.steps:.4f} s per step"
        if self.samples_per_s is None:
            return f"{seconds} (samples/s: pass update(samples=...))"
        return f"{self.samples_per_s:.3f} samples/s, {seconds}"


def known_sum(counts: Iterable[int | None]) -> int | None:
    """The sum, or None where any part is not known."""
    known = list(counts)
    return None if None in known else sum(count for count in known if count is not None)


def _advise(ranks: list[RankMemory], worst: RankMemory) -> list[str]:
    if not any(rank.steps for rank in ranks):
        return ["Nothing was measured: call start() before the first step and update() after each."]
    if worst.kind == "process":
        return ["Measure on the accelerator before choosing a batch size: memory on a CPU does not tell."]
    retries, ooms = known_sum(rank.retries for rank in ranks), known_sum(rank.ooms for rank in ranks)
    full = worst.fullness >= _FULL
    if retries or ooms:
        size = (
            f"Lower the batch size: {retries} allocations had to empty the allocator's cache and ask the "
            f"device again, {ooms} failed for good (OOM). find_batch_size(step) finds the best."
        )
    elif full:
        size = "Keep this batch size: the device is full, and no allocation had to be retried."
    else:
        room = (_FILL_TO * worst.total - worst.reserved) / GIB
        size = f"Raise the batch size: {room:.2f} GiB are free below {_FILL_TO:.0%} of the device."
    advice = [size]
    gap = worst.reserved - (worst.allocated or 0)
    # Every torch reads this name; the newer PYTORCH_ALLOC_CONF does nothing on CUDA in 2.9 (issue 183387).
    already = "expandable_segments:True" in os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")
    if not already and gap >= max(_FRAGMENTED[0] * worst.reserved, _FRAGMENTED[1] * worst.total):
        advice.append(
            "Set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True before the program starts: at the peak "
            f"{gap / GIB:.2f} GiB were reserved beyond what tensors used."
        )
    if (retries or ooms or full) and worst.allocated and worst.live is not None:
        stays = worst.live / worst.allocated
        advice.append(
            f"To make room: {1 - stays:.0%} of the peak is gone when the step is over (activations, gathered "
            "parameters, gradients), so activation checkpointing is the first thing to try."
            if stays < 0.5
            else f"To make room: {stays:.0%} of the peak stays between steps (parameters, optimizer state), "
            "so choose a sharding strategy that shards more, use more ranks, or offload to the CPU."
        )
    least = min(ranks, key=lambda rank: rank.fullness)
    if worst.fullness - least.fullness > _UNEVEN:
        more = (worst.reserved - least.reserved) / GIB
        advice.append(
            f"Even out the ranks: rank {worst.rank}, which limits all, reserves {more:.2f} GiB more than "
            f"rank {least.rank}. Look for uneven batches, or ranks that put tensors on another rank's device."
        )
    return advice
