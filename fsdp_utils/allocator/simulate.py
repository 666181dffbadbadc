"""Simulate how much memory PyTorch's CUDA allocator reserves for a trace, and whether it runs out.

Simplified: a free is complete at once; cudaMalloc fails exactly at the limit, from which the caller subtracts
what is not PyTorch's (CUDA context, NCCL); options other than expandable segments keep their defaults.
"""

from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING

from fsdp_utils._extras import need
from fsdp_utils.allocator.rules import Block, ExpandableAllocator, SegmentAllocator
from fsdp_utils.allocator.trace import GIB, AllocationTrace

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclass(frozen=True)
class OutOfMemory:
    """The allocation that failed. Sizes in GiB, at the moment of failure."""

    event: int  # index into the trace's events
    step: int  # training steps begun before it; 0 is before the first
    name: str  # the operator that asked
    requested_gib: float
    allocated_gib: float
    reserved_gib: float

    def __str__(self) -> str:
        return (
            f"in step {self.step} {self.name or 'a request'} asked for {self.requested_gib:.3f} GiB, with "
            f"{self.allocated_gib:.2f} allocated and {self.reserved_gib:.2f} reserved"
        )


@dataclass
class Simulation:
    """The result of a replay; `allocated` and `reserved` are in bytes, after each event."""

    limit_gib: float | None
    expandable_segments: bool
    allocated: list[int] = field(default_factory=list, repr=False)
    reserved: list[int] = field(default_factory=list, repr=False)
    steps: list[int] = field(default_factory=list)  # the event at which each step begins
    retries: list[int] = field(default_factory=list)  # the events that needed a retry
    out_of_memory: OutOfMemory | None = None

    @property
    def num_alloc_retries(self) -> int:
        """Allocations tried again after the cache was released, as in `torch.cuda.memory_stats()`."""
        return len(self.retries)

    @property
    def retries_by_step(self) -> list[int]:
        """Retries within each training step."""
        bounds = [*self.steps, len(self.allocated)]
        return [sum(begin <= retry < end for retry in self.retries) for begin, end in pairwise(bounds)]

    @property
    def peak_allocated_gib(self) -> float:
        """As `torch.cuda.max_memory_allocated()`, in GiB."""
        return max(self.allocated, default=0) / GIB

    @property
    def peak_reserved_gib(self) -> float:
        """As `torch.cuda.max_memory_reserved()`, in GiB."""
        return max(self.reserved, default=0) / GIB

    @property
    def regime(self) -> str:
        """ "fits", "retries" or "out of memory"."""
        return "out of memory" if self.out_of_memory else "retries" if self.retries else "fits"

    def __str__(self) -> str:
        limit = "no limit" if self.limit_gib is None else f"limit {self.limit_gib:.2f} GiB"
        segments = ", expandable segments" if self.expandable_segments else ""
        end = f"; {self.out_of_memory}" if self.out_of_memory else ""
        return (
            f"simulated allocator ({limit}{segments}): {self.regime}; {self.num_alloc_retries} retries; peak "
            f"reserved {self.peak_reserved_gib:.2f} GiB, peak allocated {self.peak_allocated_gib:.2f} GiB"
            f"{end}"
        )

    def plot(self, ax: "Axes | None" = None) -> "Axes":
        """Draw reserved and allocated memory over the events; without axes, in a new figure."""
        need("matplotlib", "notebooks")
        import matplotlib.pyplot as plt

        if ax is None:
            _, ax = plt.subplots(figsize=(8, 3.2), layout="constrained")
        reserved = [size / GIB for size in self.reserved]
        ax.fill_between(range(len(reserved)), reserved, step="post", alpha=0.25, label="reserved")
        ax.plot([size / GIB for size in self.allocated], drawstyle="steps-post", lw=1, label="allocated")
        if self.limit_gib is not None:
            ax.axhline(self.limit_gib, color="black", lw=1, ls="--", label="limit")
        ax.vlines(self.steps, 0, 1, "grey", ":", lw=0.5, transform=ax.get_xaxis_transform())
        if self.retries:
            heights = [reserved[event] for event in self.retries]
            ax.plot(self.retries, heights, "v", color="tab:red", label=f"retry ({self.num_alloc_retries})")
        if self.out_of_memory:
            ax.axvline(self.out_of_memory.event, color="tab:red", lw=2, label="out of memory")
        title = "simulated allocator" + (", expandable segments" if self.expandable_segments else "")
        ax.set(xlabel="allocations and frees", ylabel="GiB", ylim=(0, None), title=title)
        ax.legend(loc="lower right", fontsize="small")
        return ax


def simulate_allocator(
    trace: AllocationTrace, *, limit_gib: float | None = None, expandable_segments: bool = False
) -> Simulation:
    """Replay a trace through the rules of PyTorch's CUDA caching allocator: a simulation, without a GPU.

    Args:
        trace: from `record_allocations`.
        limit_gib: memory that PyTorch may reserve, in GiB; unlimited by default.
        expandable_segments: as PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True.

    Returns:
        A `Simulation`: `allocated` and `reserved` (bytes after each event), `peak_allocated_gib`,
        `peak_reserved_gib`, `num_alloc_retries`, `regime` ("fits", "retries" or "out of memory"),
        `out_of_memory` (the allocation that ended the replay, or None), `plot()`.

    Source: c10/cuda/CUDACachingAllocator.cpp.

    Raises:
        ValueError: the limit is not positive.

    Example::

        simulation = simulate_allocator(trace, limit_gib=1.0)
        print(simulation.regime, simulation.num_alloc_retries)  # fits 0
    """
    if limit_gib is not None and not limit_gib > 0:
        raise ValueError(f"simulate_allocator: expected a positive limit_gib, found {limit_gib!r}")
    result = Simulation(limit_gib, expandable_segments)
    rules = ExpandableAllocator if expandable_segments else SegmentAllocator
    allocator = rules(None if limit_gib is None else int(limit_gib * GIB))
    held: dict[int, Block] = {}
    for index, event in enumerate(trace.events):
        if event.kind == "step":
            result.steps.append(index)
        elif event.kind == "free":
            allocator.free(held.pop(event.block))
        else:
            retries_before = allocator.retries
            block = allocator.malloc(event.size, event.stream)
            if allocator.retries > retries_before:
                result.retries.append(index)
            if block:
                held[event.block] = block
            else:
                sizes = (event.size / GIB, allocator.allocated / GIB, allocator.reserved / GIB)
                result.out_of_memory = OutOfMemory(index, len(result.steps), event.name, *sizes)
        result.allocated.append(allocator.allocated)
        result.reserved.append(allocator.reserved)
        if result.out_of_memory:
            break
    return result
