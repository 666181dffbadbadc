"""The report of `Memory_Maximizer`: memory, retries and throughput over all ranks, as text and figure."""

from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from fsdp_utils._extras import need
from fsdp_utils.memory.advice import advise, known_sum
from fsdp_utils.memory.device_stats import GIB


class Step(NamedTuple):
    """The readings of one update(). Bytes and seconds; None for what the device does not report."""

    reserved: int  # peak in this step
    allocated: int | None  # peak in this step
    live: int | None  # in tensors at its end
    retries: int | None
    ooms: int | None
    seconds: float
    samples: int | None


@dataclass(frozen=True)
class RankMemory:
    """What one rank measured between start() and stop(). Bytes and seconds; None for what is not known."""

    rank: int
    device: str
    kind: str  # of DeviceStats
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
        """Peak in parts of what the rank may use, 0 to 1."""
        return self.reserved / self.total


@dataclass(frozen=True)
class MemoryReport:
    """What `Memory_Maximizer.stop()` found, over all ranks that took part.

    Where ranks differ, memory is that of the fullest one, which limits all others. None stands for what the
    device does not count.

    Args:
        device: the name of the device.
        total_gib: how much of it a rank may use.
        world_size: the ranks in the process group, whether they took part or not.
        steps: of the rank that took the most.
        seconds: from start() to the end of the last step, on the slowest rank.
        samples_per_s: of all ranks together; None unless every update() on every rank had samples.
        max_reserved_gib: the most that the allocator held; on CPU the most that was resident.
        max_reserved_pct: the same, in percent of total_gib.
        max_allocated_gib: the most that tensors occupied on any rank.
        num_alloc_retries: on all ranks together.
        num_ooms: allocations that failed for good, on all ranks together.
        advice: what to do, in words, most urgent first.
        notes: remarks about the measurement itself.
        worst: the fullest rank.
        ranks: what each rank measured, in the order of ranks.
        history: the steps of the rank that holds this report.
    """

    device: str
    total_gib: float
    world_size: int
    steps: int
    seconds: float
    samples_per_s: float | None
    max_reserved_gib: float
    max_reserved_pct: float
    max_allocated_gib: float | None
    num_alloc_retries: int | None
    num_ooms: int | None
    advice: list[str]
    notes: list[str]
    worst: RankMemory
    ranks: list[RankMemory]
    history: list[Step]

    @classmethod
    def of(
        cls, ranks: list[RankMemory], world_size: int, history: list[Step], notes: list[str]
    ) -> "MemoryReport":
        """Sum up what the ranks measured."""
        worst = max(ranks, key=lambda rank: rank.fullness)
        seconds = max(rank.seconds for rank in ranks)
        samples = known_sum(rank.samples for rank in ranks)
        allocated = [rank.allocated / GIB for rank in ranks if rank.allocated is not None]
        return cls(
            device=worst.device,
            total_gib=worst.total / GIB,
            world_size=world_size,
            steps=max(rank.steps for rank in ranks),
            seconds=seconds,
            samples_per_s=samples / seconds if samples is not None and seconds else None,
            max_reserved_gib=worst.reserved / GIB,
            max_reserved_pct=100 * worst.fullness,
            max_allocated_gib=max(allocated, default=None),
            num_alloc_retries=known_sum(rank.retries for rank in ranks),
            num_ooms=known_sum(rank.ooms for rank in ranks),
            advice=advise(ranks, worst),
            notes=notes,
            worst=worst,
            ranks=ranks,
            history=history,
        )

    def to_dict(self) -> dict[str, Any]:
        """The numbers for a log, without the history: plain values that json can write."""
        numbers = asdict(self)
        del numbers["history"]
        return numbers

    def __str__(self) -> str:
        several = len(self.ranks) > 1
        among = f", {len(self.ranks)} of {self.world_size} ranks" if self.world_size > 1 else ""
        not_counted = "not applicable: the CPU has no caching allocator" if self._on_cpu else "not known"
        reserved = (
            f"{self.max_reserved_gib:.2f} GiB = {self.max_reserved_pct:.1f}% of {self.total_gib:.2f} GiB"
        )
        rows = {self._held: reserved + (f" on rank {self.worst.rank}, the fullest" if several else "")}
        if self.max_allocated_gib is not None:
            rows["allocated"] = f"{self.max_allocated_gib:.2f} GiB"
        rows["retries"] = not_counted if self.num_alloc_retries is None else f"{self.num_alloc_retries}"
        rows["OOMs"] = not_counted if self.num_ooms is None else f"{self.num_ooms}"
        rows["throughput"] = self._throughput()
        lines = [f"Memory over {self.steps} step{'' if self.steps == 1 else 's'}{among} ({self.device})"]
        lines += [f"  {name:<10}  {value}" for name, value in rows.items()]
        lines += [f"  note: {note}" for note in self.notes]
        lines += [f"  -> {advice}" for advice in self.advice]
        return "\n".join(lines)

    __repr__ = __str__

    def plot(self) -> Any:
        """Plot the memory of each step against the device's, retries marked, and the throughput beside.

        Returns:
            A matplotlib Figure with the steps of the rank that holds this report.

        Raises:
            ModuleNotFoundError: matplotlib is not installed; says how to install it.
        """
        need("matplotlib", "notebooks")
        import matplotlib.pyplot as plt  # here: only who plots needs it

        figure, (memory, speed) = plt.subplots(1, 2, figsize=(10, 3.2), layout="constrained")
        steps = range(1, len(self.history) + 1)
        memory.plot(steps, [step.reserved / GIB for step in self.history], marker=".", label=self._held)
        if not self._on_cpu:
            allocated = [(step.allocated or 0) / GIB for step in self.history]
            memory.plot(steps, allocated, marker=".", label="allocated")
            memory.axhline(self.total_gib, color="black", linestyle="--", label="device")
        with_retries = [number for number, step in zip(steps, self.history, strict=True) if step.retries]
        for number in with_retries:
            memory.axvline(number, color="tab:red", alpha=0.6)
        memory.set(xlabel="step", ylabel="GiB", title=f"{len(with_retries)} steps with retries (red)")
        memory.legend()
        speeds, unit = [step.seconds for step in self.history], "seconds"
        if self.samples_per_s is not None:
            speeds, unit = [(step.samples or 0) / step.seconds for step in self.history], "samples/s"
        speed.plot(steps, speeds, marker=".", color="tab:green")
        speed.set(xlabel="step", ylabel=unit, title="each step")
        for axes in (memory, speed):
            axes.set_ylim(bottom=0)
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
