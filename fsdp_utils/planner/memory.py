"""How much memory does a rank hold, for what, and when?"""

from collections import Counter
from dataclasses import dataclass

from fsdp_utils.allocator.trace import GIB, AllocationEvent, AllocationTrace
from fsdp_utils.planner.work_items import ACTIVATIONS, AT_REST, Alloc, Free, Label, Recording, Step


def size_text(gib: float, digits: int = 1) -> str:
    """A size with its unit: MiB where a size in GiB would be little more than zeros."""
    return f"{gib:.{digits}f} GiB" if abs(gib) >= 0.1 else f"{gib * 1024:.{digits}f} MiB"


@dataclass(frozen=True)
class Moment:
    """The most memory that is allocated in one part of a step.

    Args:
        step: 1 or 2.
        label: of the part: its phase and its FSDP unit.
        gib: by category, at that moment; 0 is left out.
    """

    step: int
    label: Label
    gib: dict[str, float]

    @property
    def total_gib(self) -> float:
        """GiB of all categories together."""
        return sum(self.gib.values())

    def __str__(self) -> str:
        return f"{self.label.phase} of {self.label.unit}, step {self.step}"


def moments_of(recording: Recording, *, offload: bool = False) -> list[Moment]:
    """The peak of each part, in order. With offload, what lies on the host does not count."""
    held: dict[int, Alloc] = {}
    live: Counter[str] = Counter()
    total = step = 0
    moments = []
    for label, entries in recording:
        peak, at_peak = -1, {}
        for entry in entries:
            if isinstance(entry, Alloc):
                held[entry.block] = entry
                if not (offload and entry.category in AT_REST):
                    live[entry.category] += entry.size
                    total += entry.size
            elif isinstance(entry, Free):
                alloc = held.pop(entry.block)
                if not (offload and alloc.category in AT_REST):
                    live[alloc.category] -= alloc.size
                    total -= alloc.size
            elif isinstance(entry, Step):
                step += 1
            if total > peak:
                peak, at_peak = total, dict(live)
        if step:
            moments.append(Moment(step, label, {k: v / GIB for k, v in at_peak.items() if v}))
    return moments


def trace_of(recording: Recording, *, offload: bool = False) -> AllocationTrace:
    """What the simulated allocator replays."""
    trace = AllocationTrace()
    held: dict[int, Alloc] = {}
    for _, entries in recording:
        for entry in entries:
            if isinstance(entry, Alloc):
                held[entry.block] = entry
                if not (offload and entry.category in AT_REST):
                    trace.events.append(
                        AllocationEvent("alloc", entry.block, entry.size, entry.name, entry.stream)
                    )
            elif isinstance(entry, Free):
                alloc = held.pop(entry.block)
                if not (offload and alloc.category in AT_REST):
                    trace.events.append(
                        AllocationEvent("free", alloc.block, alloc.size, alloc.name, alloc.stream)
                    )
            elif isinstance(entry, Step):
                trace.begin_step()
    return trace


def at_rest_gib(recording: Recording) -> dict[str, float]:
    """The most that parameters, gradients and the optimizer's state take, each by itself, in GiB."""
    held: dict[int, Alloc] = {}
    live: Counter[str] = Counter()
    most: Counter[str] = Counter()
    for _, entries in recording:
        for entry in entries:
            if isinstance(entry, Alloc):
                held[entry.block] = entry
                live[entry.category] += entry.size
                most[entry.category] = max(most[entry.category], live[entry.category])
            elif isinstance(entry, Free):
                alloc = held.pop(entry.block)
                live[alloc.category] -= alloc.size
    return {category: most[category] / GIB for category in AT_REST}


def resized(recording: Recording, category: str, factor: float) -> Recording:
    """The recording with all tensors of a category made larger or smaller."""
    return [
        (
            label,
            [
                entry._replace(size=round(entry.size * factor))
                if isinstance(entry, Alloc) and entry.category == category
                else entry
                for entry in entries
            ],
        )
        for label, entries in recording
    ]


def offload_activations(recording: Recording, stacks: tuple[str, ...]) -> tuple[Recording, float]:
    """The recording if what blocks keep for backward lay on the host meanwhile, and how many GiB move.

    An activation leaves when the block after its own has computed, by when it is copied. It comes back when
    the backward of the block after its own begins, so that its own finds it.
    """
    parts = [(label, list(entries)) for label, entries in recording]
    made: dict[int, tuple[int, Alloc]] = {}
    # by block of memory: the part that made it, the part whose backward frees it
    kept: list[tuple[Alloc, int, int]] = []
    for number, (label, entries) in enumerate(recording):
        for entry in entries:
            if isinstance(entry, Alloc):
                made[entry.block] = (number, entry)
            elif isinstance(entry, Free):
                begin, alloc = made.pop(entry.block)
                if (
                    alloc.category == ACTIVATIONS
                    and recording[begin][0].phase == "forward"
                    and recording[begin][0].unit.rpartition(".")[0] in stacks
                    and label.phase == "backward"
                ):
                    kept.append((alloc, begin, number))
    nbytes, fresh = 0, max(made, default=0) + sum(len(entries) for _, entries in recording)
    for alloc, begin, end in kept:
        leaves, returns = begin + 1, end - 1
        if leaves + 1 >= returns:
            continue
        nbytes += alloc.size
        fresh += 1
        parts[leaves][1].append(Free(alloc.block))
        parts[returns][1].insert(0, alloc._replace(block=fresh))
        entries = parts[end][1]
        entries[entries.index(Free(alloc.block))] = Free(fresh)
    begins = sum(isinstance(entry, Step) for _, entries in recording for entry in entries)
    return parts, nbytes / GIB / max(begins, 1)
