"""The advice of a `MemoryReport`: what to change about batch size, allocator and sharding."""

import os
from collections.abc import Iterable
from typing import TYPE_CHECKING

from fsdp_utils.memory.device_stats import GIB

if TYPE_CHECKING:
    from fsdp_utils.memory.report import RankMemory

# Rules of thumb. In the measurement that this tool began with (2022, a ViT of 1.986B parameters on A10G)
# 93.83% of the device ran without a retry and 94.79% with nine, so these two lie below that.
_FULL = 0.90  # from here on a device counts as full
_FILL_TO = 0.93
_UNEVEN = 0.10  # of the device, between the fullest rank and the emptiest
_FRAGMENTED = 0.20, 0.05  # reserved and not allocated: of what is reserved, and of the device


def known_sum(counts: Iterable[int | None]) -> int | None:
    """The sum, or None where any part is not known."""
    known = list(counts)
    return None if None in known else sum(count for count in known if count is not None)


def advise(ranks: "list[RankMemory]", worst: "RankMemory") -> list[str]:
    """Say what to change, most urgent first."""
    least = min(ranks, key=lambda rank: rank.fullness)
    retries, ooms = known_sum(rank.retries for rank in ranks), known_sum(rank.ooms for rank in ranks)
    if not any(rank.steps for rank in ranks):
        return ["Nothing was measured: call start() before the first step and update() after each."]
    if worst.kind == "process":
        return ["Measure on the accelerator before choosing a batch size: memory on a CPU does not tell."]
    full = worst.fullness >= _FULL
    advice = []
    if retries or ooms:
        advice.append(
            f"Lower the batch size: {retries} allocations had to empty the allocator's cache and ask the "
            f"device again, {ooms} failed for good (OOM). find_batch_size(step) finds the best."
        )
    elif full:
        advice.append("Keep this batch size: the device is full, and no allocation had to be retried.")
    else:
        room = (_FILL_TO * worst.total - worst.reserved) / GIB
        advice.append(f"Raise the batch size: {room:.2f} GiB are free below {_FILL_TO:.0%} of the device.")
    gap = worst.reserved - (worst.allocated or 0)
    # The variable's newer name, PYTORCH_ALLOC_CONF, is no help: in torch 2.9 it does not reach CUDA's
    # allocator (pytorch issue 183387), while this one works in every version.
    already = "expandable_segments:True" in os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")
    if not already and gap >= max(_FRAGMENTED[0] * worst.reserved, _FRAGMENTED[1] * worst.total):
        advice.append(
            "Set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True before the program starts: at the peak "
            f"{gap / GIB:.2f} GiB were reserved beyond what tensors used."
        )
    if (retries or ooms or full) and worst.allocated and worst.live is not None:
        advice.append(_make_room(passing=1 - worst.live / worst.allocated))
    if worst.fullness - least.fullness > _UNEVEN:
        more = (worst.reserved - least.reserved) / GIB
        advice.append(
            f"Even out the ranks: rank {worst.rank}, which limits all, reserves {more:.2f} GiB more than "
            f"rank {least.rank}. Look for uneven batches, or for ranks that put tensors on another rank's "
            "device."
        )
    return advice


def _make_room(passing: float) -> str:
    if passing > 0.5:
        return (
            f"To make room: {passing:.0%} of the peak is gone when the step is over (activations, gathered "
            "parameters, gradients), so activation checkpointing is the first thing to try."
        )
    return (
        f"To make room: {1 - passing:.0%} of the peak stays between steps (parameters, optimizer state), so "
        "choose a sharding strategy that shards more, use more ranks, or offload to the CPU."
    )
