"""The advice of a `MemoryReport`: what to change about batch size, allocator and sharding."""

import os
from typing import TYPE_CHECKING

from fsdp_utils.memory.device_stats import GIB

if TYPE_CHECKING:
    from fsdp_utils.memory.report import MemoryReport, RankMemory

# Rules of thumb. In the measurement that this tool began with (2022, a ViT of 1.986B parameters on A10G)
# 93.83% of the device ran without a retry and 94.79% with nine, so these two lie below that.
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
    troubled = bool(report.num_ooms or report.num_alloc_retries)
    advice = [_batch_size(report, worst.total, worst.reserved), *_expandable_segments(worst)]
    if troubled or worst.fullness >= _FULL:
        advice += _make_room(worst)
    return advice + _even_out(report)


def _batch_size(report: "MemoryReport", total: int, reserved: int) -> str:
    if report.num_ooms or report.num_alloc_retries:
        return (
            f"Lower the batch size: {report.num_alloc_retries} allocations had to empty the allocator's "
            f"cache and ask the device again, {report.num_ooms} failed for good (OOM). find_batch_size(step) "
            "finds the best."
        )
    if report.worst.fullness >= _FULL:
        return "Keep this batch size: the device is full, and no allocation had to be retried."
    room = (_FILL_TO * total - reserved) / GIB
    return f"Raise the batch size: {room:.2f} GiB are free below {_FILL_TO:.0%} of the device."


def _expandable_segments(rank: "RankMemory") -> list[str]:
    reserved, total = rank.reserved or 0, rank.total or 0
    gap = reserved - (rank.allocated or 0)
    # The variable's newer name, PYTORCH_ALLOC_CONF, is no help: in torch 2.9 it does not reach CUDA's
    # allocator (pytorch issue 183387), while this one works in every version.
    already = "expandable_segments:True" in os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")
    if already or gap < _FRAGMENTED[0] * reserved or gap < _FRAGMENTED[1] * total:
        return []
    return [
        "Set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True before the program starts: at the peak "
        f"{gap / GIB:.2f} GiB were reserved beyond what tensors used."
    ]


def _make_room(rank: "RankMemory") -> list[str]:
    if not rank.allocated or rank.live is None:
        return []
    passing = 1 - rank.live / rank.allocated
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
