"""What does a step of child tuning cost against AdamW's fused step, for few large and many small tensors?

The same ways as in benchmarks/child_tuning.py, which measures them on a CPU; all in turn, on one GPU.
"""

from typing import Any

import torch

from benchmarks.child_tuning import measure as measure_in_turn
from benchmarks.child_tuning import ratios, ways
from benchmarks.gpu_parts import Done, Result, Setting, workload

USES = (
    "benchmarks/child_tuning.py",
    "fsdp_utils/child_tuning/optimizer.py",
    "fsdp_utils/child_tuning/random_masks.py",
    "fsdp_utils/child_tuning/masked_step.py",
    "fsdp_utils/child_tuning/fixed_mask.py",
)
GROUP = None
SHAPES = ((20, 1024), (1000, 64), (20, 4096))


def settings(tiny: bool, done: Done) -> list[Setting]:
    shapes = ((2, 64),) if tiny else SHAPES
    return [{"tensors": tensors, "side": side} for tensors, side in shapes]


def measure(setting: Setting, device: torch.device, tiny: bool) -> Result:
    steps = ways(setting["tensors"], setting["side"], device.type)
    seconds = measure_in_turn(steps, 2 if tiny else 50, device.type)
    return {
        "step_s": {name: workload.spread(each) for name, each in seconds.items()},
        "ratios": ratios(seconds),
    }


def summarize(done: Done) -> dict[str, Any]:
    """Each way against AdamW's fused step, by shape."""
    return {f"{s['tensors']}_of_{s['side']}": result["ratios"] for s, result in done}
