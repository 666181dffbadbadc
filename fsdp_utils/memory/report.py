"""The report of `Memory_Maximizer`: memory, retries and throughput over all ranks, as text and figure."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from fsdp_utils._extras import need
from fsdp_utils.distributed.identity import get_rank
from fsdp_utils.memory.advice import advise
from fsdp_utils.memory.device_stats import GIB, DeviceStats


class Step(NamedTuple):
    """The readings of one update(). Bytes and seconds; None for what the device does not report."""

    reserved: int | None  # peak in this step
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
    total: int | None
    reserved: int | None  # peak
    allocated: int | None  # peak
    live: int | None  # in tensors when the last step was over
    retries: int | None
    ooms: int | None
    steps: int
    seconds: float
    samples: int | None  # None where some step had none

    @classmethod
    def of(cls, stats: DeviceStats, steps: Sequence[Step], after: Step, seconds: float) -> "RankMemory":
        """Sum up this rank's steps and what came after them."""
        seen = [*steps, after]
        return cls(
            rank=get_rank(),
            device=stats.name,
            kind=stats.kind,
            total=stats.total,
            reserved=max((step.reserved for step in seen if step.reserved is not None), default=None),
            allocated=max((step.allocated for step in seen if step.allocated is not None), default=None),
            live=steps[-1].live if steps else None,
            retries=_sum(step.retries for step in seen),
            ooms=_sum(step.ooms for step in seen),
            steps=len(steps),
            seconds=seconds,
            samples=_sum(step.samples for step in steps) if steps else None,
        )

    @property
    def fullness(self) -> float:
        """Peak in parts of what the rank may use, 0 to 1; 0 where that is not known."""
        return (self.reserved or 0) / self.total if self.total else 0.0


@dataclass(frozen=True)
class MemoryReport:
    """What `Memory_Maximizer.stop()` found, over all ranks that took part.

    Where ranks differ, memory is that of the fullest rank, `worst`: the one that limits all others.

    Args:
        ranks: what each rank measured, in the order of ranks.
        world_size: number of ranks in the process group, whether they took part or not.
        history: the steps of the rank that holds this report.
        rank: the rank that holds this report.
        notes: remarks about the measurement itself.
    """

    ranks: tuple[RankMemory, ...]
    world_size: int
    history: tuple[Step, ...]
    rank: int
    notes: tuple[str, ...] = ()

    @property
    def worst(self) -> RankMemory:
        """The rank whose device was fullest."""
        return max(self.ranks, key=lambda rank: rank.fullness)

    @property
    def device(self) -> str:
        """Name of the device of the fullest rank."""
        return self.worst.device

    @property
    def total_gib(self) -> float | None:
        """GiB that a rank may use on that device."""
        return _gib(self.worst.total)

    @property
    def steps(self) -> int:
        """Steps of the rank that took the most."""
        return max(rank.steps for rank in self.ranks)

    @property
    def max_reserved_gib(self) -> float | None:
        """The most that the fullest rank's allocator held; on CPU the most that was resident."""
        return _gib(self.worst.reserved)

    @property
    def max_reserved_pct(self) -> float | None:
        """The same, in percent of total_gib."""
        return 100 * self.worst.fullness if self.worst.reserved and self.worst.total else None

    @property
    def max_allocated_gib(self) -> float | None:
        """The most that tensors occupied on any rank."""
        return _gib(max((rank.allocated for rank in self.ranks if rank.allocated is not None), default=None))

    @property
    def num_alloc_retries(self) -> int | None:
        """Retries on all ranks together; None where the device has none to count."""
        return _sum(rank.retries for rank in self.ranks)

    @property
    def num_ooms(self) -> int | None:
        """Allocations that failed for good, on all ranks together."""
        return _sum(rank.ooms for rank in self.ranks)

    @property
    def seconds(self) -> float:
        """From start() to the end of the last step, on the slowest rank."""
        return max(rank.seconds for rank in self.ranks)

    @property
    def samples_per_s(self) -> float | None:
        """Samples of all ranks together per second; None unless every update() on every rank had samples."""
        samples = _sum(rank.samples for rank in self.ranks)
        return samples / self.seconds if samples is not None and self.seconds else None

    @property
    def advice(self) -> list[str]:
        """What to do, in words, most urgent first."""
        return advise(self)

    def to_dict(self) -> dict[str, Any]:
        """The numbers for a log: plain values that json can write."""
        names = (
            "device total_gib world_size steps seconds samples_per_s max_reserved_gib max_reserved_pct "
            "max_allocated_gib num_alloc_retries num_ooms advice notes"
        )
        numbers = {name: getattr(self, name) for name in names.split()}
        return {**numbers, "worst_rank": self.worst.rank, "ranks": [asdict(rank) for rank in self.ranks]}

    def __str__(self) -> str:
        ranks = f", {len(self.ranks)} of {self.world_size} ranks" if self.world_size > 1 else ""
        title = f"Memory over {self.steps} step{'' if self.steps == 1 else 's'}{ranks} ({self.device})"
        on_cpu = self.worst.kind == "process"
        not_counted = "not applicable: the CPU has no caching allocator" if on_cpu else "not known"
        rows = [
            (_held(self.worst.kind), self._memory()),
            ("retries", not_counted if self.num_alloc_retries is None else f"{self.num_alloc_retries}"),
            ("OOMs", not_counted if self.num_ooms is None else f"{self.num_ooms}"),
            ("throughput", self._throughput()),
        ]
        if self.max_allocated_gib is not None:
            rows.insert(1, ("allocated", f"{self.max_allocated_gib:.2f} GiB"))
        lines = [title, *(f"  {name:<10}  {value}" for name, value in rows)]
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
        mine = next(rank for rank in self.ranks if rank.rank == self.rank)
        for label, name in ((_held(mine.kind), "reserved"), ("allocated", "allocated")):
            if getattr(mine, name) is not None:
                sizes = [getattr(step, name) / GIB for step in self.history]
                memory.plot(steps, sizes, marker=".", label=label)
        if mine.total and mine.kind == "allocator":
            memory.axhline(mine.total / GIB, color="black", linestyle="--", label="device")
        with_retries = [number for number, step in zip(steps, self.history, strict=True) if step.retries]
        for number in with_retries:
            memory.axvline(number, color="tab:red", alpha=0.6)
        retried = f", {len(with_retries)} steps with retries (red)" if with_retries else ""
        memory.set(xlabel="step", ylabel="GiB", title=f"rank {self.rank}{retried}")
        memory.set_ylim(bottom=0)
        if memory.get_legend_handles_labels()[0]:
            memory.legend()

        if mine.samples is None:
            speeds, unit = [step.seconds for step in self.history], "seconds"
        else:
            speeds, unit = [(step.samples or 0) / step.seconds for step in self.history], "samples/s"
        speed.plot(steps, speeds, marker=".", color="tab:green")
        speed.set(xlabel="step", ylabel=unit, title="each step")
        speed.set_ylim(bottom=0)
        plt.close(figure)  # a notebook would show it a second time
        return figure

    def _memory(self) -> str:
        if self.worst.reserved is None:
            return "not known"
        text = f"{self.max_reserved_gib:.2f} GiB"
        if self.worst.total:
            text += f" = {self.max_reserved_pct:.1f}% of {self.total_gib:.2f} GiB"
        return text + (f" on rank {self.worst.rank}, the fullest" if len(self.ranks) > 1 else "")

    def _throughput(self) -> str:
        if not self.steps:
            return "not known: no step was counted"
        seconds = f"{self.seconds / self.steps:.4f} s per step"
        if self.samples_per_s is None:
            return f"{seconds} (samples/s: pass update(samples=...))"
        return f"{self.samples_per_s:.3f} samples/s, {seconds}"


def _held(kind: str) -> str:
    return "resident" if kind == "process" else "reserved"


def _gib(size: int | None) -> float | None:
    return None if size is None else size / GIB


def _sum(counts: Iterable[int | None]) -> int | None:
    """The sum, or None where any part is not known."""
    known = list(counts)
    return None if None in known else sum(count for count in known if count is not None)
