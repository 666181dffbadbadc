"""What does Memory_Maximizer.update() cost a training step, and what did the way of 2022 cost?

Steps of about 10 ms of matrix products, in rounds that take turns: alone; with update(); with the calls that
the class of 2022 made at each step (`memory_stats` and the reserved bytes).
"""

import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.gpu_parts import Done, Result, Setting, workload
from fsdp_utils import Memory_Maximizer

USES = (
    "benchmarks/gpu_parts/workload.py",
    "fsdp_utils/memory/maximizer.py",
    "fsdp_utils/memory/device_stats.py",
)
GROUP = None
STEP_S = 0.010


def settings(tiny: bool, done: Done) -> list[Setting]:
    return [{"step_s": STEP_S}]


def measure(setting: Setting, device: torch.device, tiny: bool) -> Result:
    rounds, steps, calls = (2, 3, 10) if tiny else (9, 50, 2000)
    side = 256 if tiny else 4096
    matrix = torch.randn(side, side, device=device) / side**0.5  # products neither grow nor vanish
    matrix = matrix.to(torch.float32 if device.type == "cpu" else torch.bfloat16)

    def work(products: int) -> None:
        out = matrix
        for _ in range(products):
            out = out @ matrix

    workload.seconds_per_step(lambda: work(10), 3, device)
    one = min(workload.seconds_per_step(lambda: work(10), 5, device)) / 10
    products = max(1, round(setting["step_s"] / one))

    maximizer = Memory_Maximizer(device, verbose=False)
    maximizer.start()
    ways: dict[str, Callable[[], Any]] = {
        "alone": lambda: None,
        "update": lambda: maximizer.update(samples=1),
    }
    if device.type == "cuda":
        ways["2022"] = lambda: (torch.cuda.memory_stats(), torch.cuda.memory_reserved())
    per_step: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, after in ways.items():

            def step(after: Callable[[], Any] = after) -> None:
                work(products)
                after()

            per_step[name].append(sum(workload.seconds_per_step(step, steps, device)) / steps)
    call_s = {}
    for name, after in ways.items():
        begin = time.perf_counter()
        for _ in range(calls):
            after()
        call_s[name] = (time.perf_counter() - begin) / calls
    maximizer.stop()
    return {
        "products": products,
        "step_s": {name: workload.spread(seconds) for name, seconds in per_step.items()},
        "call_s": call_s,
    }


def summarize(done: Done) -> dict[str, Any]:
    """What a step with update() takes beyond one without, as a share; and the calls themselves, in µs."""
    ((_, result),) = done
    median = {name: spread["median"] for name, spread in result["step_s"].items()}
    return {
        "overhead": {name: median[name] / median["alone"] - 1 for name in median if name != "alone"},
        "call_us": {name: seconds * 1e6 for name, seconds in result["call_s"].items() if name != "alone"},
    }
