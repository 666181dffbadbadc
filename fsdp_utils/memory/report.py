"""The report of `Memory_Maximizer`: memory, retries and throughput over all ranks, as text, HTML, figure."""

import html
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from fsdp_utils._extras import need
from fsdp_utils.memory.advice import advise
from fsdp_utils.memory.device_stats import GIB


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
    steps_with_retries: int
    seconds: float
    samples: int | None  # None where some step had none
    batch: int | None  # most samples in one step

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
    def fragmentation_pct(self) -> float | None:
        """Of what the fullest rank's allocator held at its peak, the percentage beyond its tensors' peak."""
        worst = self.worst
        if worst.allocated is None or not worst.reserved:
            return None
        return 100 * (1 - worst.allocated / worst.reserved)

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
        """What to do, in words."""
        return advise(self)

    def to_dict(self) -> dict[str, Any]:
        """The numbers for a log: plain values that json can write."""
        names = (
            "device total_gib world_size steps seconds samples_per_s max_reserved_gib max_reserved_pct "
            "max_allocated_gib fragmentation_pct num_alloc_retries num_ooms advice"
        )
        return {
            **{name: getattr(self, name) for name in names.split()},
            "worst_rank": self.worst.rank,
            "notes": list(self.notes),
            "ranks": [asdict(rank) for rank in self.ranks],
        }

    def __str__(self) -> str:
        rows = self._rows()
        width = max(len(name) for name, _ in rows)
        lines = [self._title()]
        lines += [f"  {name:<{width}}  {value}" for name, value in rows]
        lines += [f"  note: {note}" for note in self.notes]
        lines += [f"  -> {advice}" for advice in self.advice]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        cell = '<td style="text-align:left">{}</td>'.format
        rows = "".join(
            f"<tr>{cell(html.escape(name))}{cell(html.escape(value))}</tr>" for name, value in self._rows()
        )
        remarks = [f"note: {note}" for note in self.notes] + [f"→ {advice}" for advice in self.advice]
        below = "".join(f"<div>{html.escape(remark)}</div>" for remark in remarks)
        return f"<b>{html.escape(self._title())}</b><table>{rows}</table>{below}"

    def plot(self) -> Any:
        """Memory of each step against what the device has, retries marked, and the throughput beside.

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
        for name, values in (
            (_held(mine.kind), [step.reserved for step in self.history]),
            ("allocated", [step.allocated for step in self.history]),
        ):
            known = [value for value in values if value is not None]
            if known and len(known) == len(values):
                memory.plot(steps, [value / GIB for value in known], marker=".", label=name)
        if mine.total and mine.kind == "allocator":
            memory.axhline(mine.total / GIB, color="black", linestyle="--", label="device")
        for step, seen in zip(steps, self.history, strict=True):
            if seen.retries:
                memory.axvline(step, color="tab:red", alpha=0.6)
        retried = sum(1 for step in self.history if step.retries)
        memory.set(
            xlabel="step",
            ylabel="GiB",
            title=f"rank {self.rank}" + (f", {retried} steps with retries (red)" if retried else ""),
        )
        memory.set_ylim(bottom=0)
        if memory.get_legend_handles_labels()[0]:
            memory.legend()

        with_samples = all(step.samples is not None for step in self.history)
        speed.plot(
            steps,
            [(step.samples or 0) / step.seconds if with_samples else step.seconds for step in self.history],
            marker=".",
            color="tab:green",
        )
        speed.set(xlabel="step", ylabel="samples/s" if with_samples else "seconds", title="each step")
        speed.set_ylim(bottom=0)
        plt.close(figure)  # a notebook would show it a second time
        return figure

    def _title(self) -> str:
        ranks = f", {len(self.ranks)} of {self.world_size} ranks" if self.world_size > 1 else ""
        return f"Memory over {self.steps} step{'' if self.steps == 1 else 's'}{ranks} ({self.device})"

    def _rows(self) -> list[tuple[str, str]]:
        worst = self.worst
        if worst.reserved is None:
            memory = "not known"
        else:
            memory = f"{worst.reserved / GIB:.2f} GiB"
            if worst.total:
                memory += f" = {100 * worst.fullness:.1f}% of {worst.total / GIB:.2f} GiB"
            if len(self.ranks) > 1:
                least = min(rank.reserved for rank in self.ranks if rank.reserved is not None)
                memory += f" on rank {worst.rank}, the fullest; least {least / GIB:.2f} GiB"
        rows = [(_held(worst.kind), memory)]
        if (allocated := self.max_allocated_gib) is not None:
            rows.append(("allocated", f"{allocated:.2f} GiB"))
        if (fragmentation := self.fragmentation_pct) is not None:
            rows.append(("fragmentation", f"{fragmentation:.1f}% of what is reserved"))
        rows.append(("retries", self._count("retries")))
        rows.append(("OOMs", self._count("ooms")))
        if self.samples_per_s is not None:
            speed = f"{self.samples_per_s:.3f} samples/s, {self.seconds / self.steps:.4f} s per step"
        elif self.steps:
            speed = f"{self.seconds / self.steps:.4f} s per step (samples/s: pass update(samples=...))"
        else:
            speed = "not known: no step was counted"
        return [*rows, ("throughput", speed)]

    def _count(self, name: str) -> str:
        """A counter over all ranks, and where it is not 0."""
        counts = {rank.rank: getattr(rank, name) for rank in self.ranks}
        total = _sum(counts.values())
        if total is None:
            on_cpu = self.worst.kind == "process"
            return "not applicable: the CPU has no caching allocator" if on_cpu else "not known"
        where = [f"{count} on rank {rank}" for rank, count in counts.items() if count]
        return f"{total} ({', '.join(where)})" if where and len(self.ranks) > 1 else str(total)


def _held(kind: str) -> str:
    return "resident" if kind == "process" else "reserved"


def _gib(size: int | None) -> float | None:
    return None if size is None else size / GIB


def _sum(counts: Iterable[int | None]) -> int | None:
    """The sum, or None where any part is not known."""
    total = 0
    for count in counts:
        if count is None:
            return None
        total += count
    return total
