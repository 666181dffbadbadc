"""Compute how much memory a rank holds, for what, and when."""

from collections import Counter
from dataclasses import dataclass

from fsdp_utils.allocator.trace import GIB, AllocationEvent, AllocationTrace
from fsdp_utils.planner.work_items import AT_REST, Alloc, Begin, Free, Label, Recording


@dataclass(frozen=True)
class Moment:
    """The most memory that is allocated in one part of a step."""

    step: int  # 1 or 2
    label: Label  # the part's phase and FSDP unit
    gib: dict[str, float]  # by category, at that moment; 0 is left out

    @property
    def total_gib(self) -> float:
        """GiB of all categories together."""
        return sum(self.gib.values())

    def __str__(self) -> str:
        return f"{self.label.phase} of {self.label.unit}, step {self.step}"


def memory_of(
    recording: Recording, *, offload: bool
) -> tuple[list[Moment], AllocationTrace, dict[str, float]]:
    """Return the peak of each part, what the allocator does, and GiB of what is sharded, at its most.

    With offload, what is sharded lies on the host and takes no memory.
    """
    moments, trace, hosted = list[Moment](), AllocationTrace(), AT_REST if offload else ()
    held: dict[int, Alloc] = {}
    live: Counter[str] = Counter()
    most: Counter[str] = Counter()
    total = step = 0
    for label, items in recording:
        peak, at_peak = -1, {}
        for item in items:
            if isinstance(item, Begin) and item.micro_batch == 0:
                step += 1
                trace.begin_step()
            elif isinstance(item, Alloc | Free):
                is_new = isinstance(item, Alloc)
                alloc = held.setdefault(item.block, item) if is_new else held.pop(item.block)
                category, change = alloc.category, alloc.size if is_new else -alloc.size
                live[category] += change
                most[category] = max(most[category], live[category])
                if category not in hosted:
                    total += change
                    kind, stream = "alloc" if is_new else "free", alloc.stream
                    trace.events.append(AllocationEvent(kind, alloc.block, alloc.size, stream=stream))
            if total > peak:
                peak, at_peak = total, dict(live)
        if step:
            gib = {name: size / GIB for name, size in at_peak.items() if size and name not in hosted}
            moments.append(Moment(step, label, gib))
    return moments, trace, {category: most[category] / GIB for category in AT_REST}
