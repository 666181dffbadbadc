"""What does Memory_Maximizer.update() cost per step, and what did the way of 2022 cost?

    python benchmarks/maximizer.py [--rounds 30]

On the CPU update() asks the system for the process's memory. What it does for a GPU is measured against a
dictionary of the shape and size that CUDA's allocator gives, without the allocator: that is the part in
Python, and the allocator's own part is the same in both ways. The class of 2022 called
torch.cuda.memory_reserved() each step, which flattens and sorts that dictionary to take one number from it.

Exits with 1 if a limit that the project promises is broken.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch

from benchmarks.machine import describe, limits, table
from fsdp_utils import Memory_Maximizer
from fsdp_utils.memory.device_stats import AllocatorStats

CALLS = 200  # in a row, per round
UPDATE_US = 50.0  # the limit, on the CPU


def cuda_like_stats() -> dict[str, Any]:
    """What torch.cuda.memory_stats_as_nested_dict() returns, as torch 2.13 documents it."""
    one = {"current": 2**30, "peak": 2**31, "allocated": 2**40, "freed": 2**40}
    pools = {"all": dict(one), "small_pool": dict(one), "large_pool": dict(one)}
    pooled = (
        "allocation segment active inactive_split allocated_bytes reserved_bytes active_bytes "
        "inactive_split_bytes requested_bytes"
    )
    counters = (
        "num_alloc_retries num_ooms num_sync_all_streams num_device_alloc num_device_free max_split_size"
    )
    return {
        **{name: {pool: dict(values) for pool, values in pools.items()} for name in pooled.split()},
        **{name: dict(one) for name in ("oversize_allocations", "oversize_segments")},
        **dict.fromkeys(counters.split(), 0),
    }


class CudaWithoutGpu:
    """As much of torch.cuda as update() needs, without a GPU."""

    stats = cuda_like_stats()

    def memory_stats_as_nested_dict(self, index: int) -> dict[str, Any]:
        return self.stats

    def reset_peak_memory_stats(self, index: int) -> None:
        pass

    def get_device_name(self, index: int) -> str:
        return "imagined"

    def get_device_properties(self, index: int) -> Any:
        return type("Properties", (), {"total_memory": 80 * 2**30})


def started(device: Any) -> Memory_Maximizer:
    maximizer = Memory_Maximizer(device, verbose=False)
    maximizer.start()
    return maximizer


class NoWait(AllocatorStats):
    def synchronize(self) -> None:
        """There is nothing to wait for."""


def update_for_a_gpu() -> Callable[[], object]:
    with patch.object(torch, "get_device_module", lambda device: CudaWithoutGpu()):
        # Not called "cuda": for that name a question goes to CUDA itself, which a CPU build has not.
        maximizer = started(NoWait(torch.device("xpu", 0)))
    return lambda: maximizer.update(samples=1)


def way_of_2022() -> tuple[float, float]:
    stats = CudaWithoutGpu.stats
    with patch.object(torch.cuda.memory, "memory_stats_as_nested_dict", lambda device=None: stats):
        return microseconds(torch.cuda.memory_reserved)


def microseconds(call: Callable[[], object]) -> tuple[float, float]:
    """Per call: processor time of this thread, in user and system, and time on the clock."""
    processor, clock = time.thread_time(), time.perf_counter()
    for _ in range(CALLS):
        call()
    return (time.thread_time() - processor) / CALLS * 1e6, (time.perf_counter() - clock) / CALLS * 1e6


def main() -> int:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=30)
    rounds = parser.parse_args().rounds

    on_cpu, for_gpu = started("cpu"), update_for_a_gpu()
    ways: dict[str, Callable[[], tuple[float, float]]] = {
        "update() on the CPU": lambda: microseconds(lambda: on_cpu.update(samples=1)),
        "update() for a GPU, in Python": lambda: microseconds(for_gpu),
        "memory_reserved() of 2022, in Python": way_of_2022,
    }
    for measure in ways.values():
        measure()  # warm
    seen: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for _ in range(rounds):  # in turn, so that a busy moment of the machine meets all of them
        for name, measure in ways.items():
            seen[name].append(measure())

    print(describe())
    print(f"microseconds per call: medians of {rounds} rounds of {CALLS} calls, all ways in turn")
    print("on a machine that does other things too, the clock also counts those\n")
    medians = {
        name: [statistics.median(times) for times in zip(*each, strict=True)] for name, each in seen.items()
    }
    rows = [
        [name, *(f"{median:.1f}" for median in medians[name]), f"{min(each)[0]:.1f}-{max(each)[0]:.1f}"]
        for name, each in seen.items()
    ]
    print(table(["what", "processor", "clock", "range of processor"], rows))
    cpu, gpu, before = (processor for processor, _ in medians.values())
    return limits(
        {
            f"update() on the CPU takes {cpu:.1f} us (limit {UPDATE_US:g})": cpu <= UPDATE_US,
            f"for a GPU it takes {gpu / before:.2f} of what the way of 2022 took (limit 1)": gpu <= before,
        }
    )


if __name__ == "__main__":
    sys.exit(main())
