"""How much of a GPU's published rates does training reach? The one table of constants behind `Plan.step_s`.

A constant is either what a source measured, named beside it, or fitted: tools/fit_planner.py finds it on
the published runs of notebooks/published.yaml that are marked for fitting, and prints this table. Runs that
are kept for checking are never fitted; benchmarks/planner.py holds the predictions against them.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fsdp_utils.planner.gpus import GPU, GPUS


@dataclass(frozen=True)
class Efficiency:
    """Shares of a rate from 0 to 1, and seconds; an estimate uses `of_gpu`, a roofline `BOUND`.

    Args:
        matmul: share of `GPU.reached_tflops` that matrix products keep up over a whole step.
        memory: share of the memory's rate that kernels reach which move more than they compute.
        fused: share of these kernels' bytes that torch.compile leaves; 1 where nothing is compiled.
        attention: share of `GPU.half_tflops` that attention in one fused kernel reaches, both passes.
        launch_s: seconds in which Python and PyTorch start one kernel.
        link: share of NVLink's or PCIe's rate that a collective within a host reaches.
        network: the same for the network between hosts.
        by_shape: the bytes of a matrix product take time beside its operations, so that small ones reach
            less.
    """

    matmul: float
    memory: float
    fused: float
    attention: float
    launch_s: float
    link: float
    network: float
    by_shape: bool


BOUND = Efficiency(1.0, 1.0, 1.0, 1.0, 0.0, 1.0, 1.0, False)

# Fitted (the first three; the last, for all other GPUs, is between them). By the beginning of the GPU's name;
# "H" is Hopper, whose power limit slows down long products.
MATMUL = {"A100": 0.835, "H100-500W": 0.66, "H": 0.73, "": 0.75}
# Both passes, causal, heads of 128, sequences of 4k to 16k. A100: 170 to 190 of 312 TFLOP/s,
# FlashAttention-2 on H100: 250 to 300 of 989, figures 4 to 7 of arxiv.org/abs/2307.08691; FlashAttention-3
# on H100: 500 to 600, figures 5 and 6 of arxiv.org/abs/2407.08608. None of these was checked at its source.
ATTENTION = {"A100": 0.56, "H": 0.28, "": 0.4}
FLASH_3 = 0.5
FLASH_1 = 0.6  # of what FlashAttention-2 reaches: its paper says 1.7 to 3.0 times as fast
# BabelStream on A100 and H100 copies at 0.87 to 0.92 of the published rate (github.com/UoB-HPC/BabelStream)
MEMORY = 0.85
FUSED = 0.35  # fitted
# 5 to 10 us an operator in eager mode, more under hooks:
# pytorch.org/blog/accelerating-pytorch-with-cuda-graphs
LAUNCH_S = 8e-6
# nccl-tests on 8 GPUs: 230 to 240 of 300 GB/s (A100), 360 to 370 of 450 (H100); the network alike
LINK = NETWORK = 0.8

# Fitted. Measured step divided by predicted step: the middle 80% of the published runs of each kind.
STEP_RANGE = {"eager": (0.88, 1.14), "compiled": (0.88, 1.05)}
# Measured peak memory divided by the predicted: the middle 80% of the published runs that tell it.
MEMORY_RANGE = (0.83, 1.12)
RUNS = {"eager": 50, "compiled": 11, "memory": 14}
# What these runs had, printed by tools/fit_planner.py; all are of dense decoders, Llama and MPT.
PUBLISHED: dict[str, tuple[Any, ...]] = {
    "gpu": ("A100-40", "A100-80", "H100", "H100-500W"),
    "precision": ("bf16", "bf16_reduce_fp32", "pure_bf16"),
    "optimizer": ("adamw",),
    "attention": ("flash", "flash1", "sdpa"),
    "tensor_parallel": (1,),
    "offload": (False,),
    "activation_offload": (False,),
}


def of_gpu(name: str, *, compiled: bool, attention: str) -> Efficiency:
    """What training reaches on the GPU of that name."""
    flash = FLASH_3 if attention == "flash3" else _by_name(ATTENTION, name)
    flash *= FLASH_1 if attention == "flash1" else 1.0
    return Efficiency(
        _by_name(MATMUL, name), MEMORY, FUSED if compiled else 1.0, flash, LAUNCH_S, LINK, NETWORK, True
    )


def unlike(gpu: GPU, **values: Any) -> list[str]:
    """In what a plan differs from the published runs, as far as `PUBLISHED` knows.

    Args:
        gpu: the same as a published one if it differs in nothing but its name, memory and network.
        values: of the arguments of `plan`; those that are not in `PUBLISHED` do not count.
    """
    free = {name: getattr(gpu, name) for name in ("name", "usable_gib", "memory_gb_s", "network_gb_s")}
    known = any(replace(GPUS[name], **free) == gpu for name in PUBLISHED["gpu"] if name in GPUS)
    return ([] if known else [f"gpu {gpu.name}"]) + [
        f"{name} {value}" for name, value in values.items() if value not in PUBLISHED.get(name, (value,))
    ]


def kind(compiled: bool) -> str:
    return "compiled" if compiled else "eager"


def _by_name(table: dict[str, float], name: str) -> float:
    return next(value for begin, value in table.items() if name.startswith(begin))


RECORDING = Path(__file__).parents[2] / "notebooks" / "recorded" / "planner.json"


def accuracy(compiled: bool = False, file: Path = RECORDING, differs: Sequence[str] = ()) -> str:
    """State how far off such predictions were on published runs, and on a GPU where that is recorded.

    A copy of the library without notebooks/ has no recording. Nothing is known of a plan that differs from
    the published runs.
    """
    if differs:
        return (
            "how far off this prediction may be is unknown: none of the published runs that tell plan's "
            f"error has {' or '.join(differs)}"
        )
    low, high = STEP_RANGE[kind(compiled)]
    least, most = MEMORY_RANGE
    text = (
        f"of {RUNS[kind(compiled)]} published {kind(compiled)} runs, 80% took {low:.2f} to {high:.2f} "
        "times the "
        f"predicted step; of {RUNS['memory']} that tell their memory, 80% took {least:.2f} to {most:.2f} "
        "times "
        "the predicted"
    )
    if not file.exists():
        return text
    recording = json.loads(file.read_text(encoding="utf-8"))
    parts = [
        f"{name} {error['median']:.0%} (worst {error['worst']:.0%})"
        for name, error in recording["results"]["errors"].items()
    ]
    return (
        f"{text}; error over {recording['results']['settings']} settings of one rank on one "
        f"{recording['device']}, median: {', '.join(parts)}"
    )
