"""The advice of a `MemoryReport`: what to change about batch size, allocator and sharding."""

import os
from typing import TYPE_CHECKING

from fsdp_utils.memory.device_stats import GIB

if TYPE_CHECKING:
    from fsdp_utils.memory.report import MemoryReport, RankMemory

# Rules of thumb. In the measurement that this tool began with (2022, a ViT of 1.986B parameters on A10G)
# 93.83% of the device ran without a retry and 94.79% with nine, so the first two lie just below that.
_FULL = 0.90  # from here on a device counts as full
_FILL_TO = 0.93
_UNEVEN = 0.10  # of the device, between the fullest rank and the emptiest
_FRAGMENTED = 0.20, 0.05  # reserved and not allocated: of what is reserved, and of the device


def advise(report: "MemoryReport") -> list[str]:
    """What to change, most urgent first."""
    worst = report.worst
    if not report.steps:
        return ["Nothing was measured: call start() before the first step and update() after each."]
    if worst.kind == "process":
        return ["Measure on the accelerator before choosing a batch size: memory on a CPU does not tell."]
    if worst.reserved is None or not worst.total:
        return ["Choose by seconds per step: this device tells nothing about its memory."]
    return [*_batch_size(report), *_expandable_segments(worst), *_room(report), *_even_out(report)]


def _trouble(report: "MemoryReport") -> bool:
    return bool(report.num_ooms or report.num_alloc_retries)


def _batch_size(report: "MemoryReport") -> list[str]:
    if _trouble(report):
        if report.num_ooms:
            why = f"{report.num_ooms} allocations failed for good (OOM)"
        else:
            steps = max(rank.steps_with_retries for rank in report.ranks)
            why = (
                f"{steps} of {report.steps} steps had to empty the allocator's cache and ask the device again"
            )
        return [f"Lower the batch size: {why}. find_batch_size(step) finds the best."]
    if report.worst.fullness >= _FULL:
        return ["Keep this batch size: the device is full, and no allocation had to be retried."]
    return [_raise_by(report.worst)]


def _raise_by(rank: "RankMemory") -> str:
    room = _FILL_TO * (rank.total or 0) - (rank.reserved or 0)
    text = f"Raise the batch size: {room / GIB:.2f} GiB are free below {_FILL_TO:.0%} of the device"
    if rank.batch and rank.allocated is not None and rank.live is not None and rank.allocated > rank.live:
        # A sample is charged too much here (gathered parameters and gradients do not grow with the batch),
        # so that the estimate errs to the safe side.
        per_sample = (rank.allocated - rank.live) / rank.batch
        if more := int(room / per_sample):
            text += f", enough for some {more} samples more per step and rank"
    return text + "."


def _expandable_segments(rank: "RankMemory") -> list[str]:
    assert rank.reserved is not None
    assert rank.total is not None
    gap = rank.reserved - (rank.allocated or 0)
    # The variable's newer name, PYTORCH_ALLOC_CONF, is no help: in torch 2.9 it does not reach CUDA's
    # allocator (pytorch issue 183387), while this one works in every version.
    already = "expandable_segments:True" in os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")
    if already or gap < _FRAGMENTED[0] * rank.reserved or gap < _FRAGMENTED[1] * rank.total:
        return []
    return [
        "Set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True before the program starts: at the peak "
        f"{gap / GIB:.2f} GiB were reserved beyond what tensors used."
    ]


def _room(report: "MemoryReport") -> list[str]:
    """What to save memory on, where the device is full."""
    worst = report.worst
    if not worst.allocated or worst.live is None or not (_trouble(report) or worst.fullness >= _FULL):
        return []
    passing = 1 - worst.live / worst.allocated
    if passing > 0.5:
        return [
            f"To make room: {passing:.0%} of the peak is gone when the step is over (activations, gathered "
            "parameters, gradients), so activation checkpointing is the first thing to try."
        ]
    return [
        f"To make room: {1 - passing:.0%} of the peak stays between steps (parameters, optimizer state), so "
        "choose a sharding strategy that shards more, use more ranks, or offload to the CPU."
    ]


def _even_out(report: "MemoryReport") -> list[str]:
    worst, least = report.worst, min(report.ranks, key=lambda rank: rank.fullness)
    if worst.fullness - least.fullness <= _UNEVEN:
        return []
    more = ((worst.reserved or 0) - (least.reserved or 0)) / GIB
    return [
        f"Even out the ranks: rank {worst.rank}, which limits all, reserves {more:.2f} GiB more than rank "
        f"{least.rank}. Look for uneven batches, or for ranks that put tensors on another rank's device."
    ]
