"""What does a step of child tuning cost, against AdamW, and what did the way of 2022 cost?

    python benchmarks/child_tuning.py [--rounds 15] [--threads 1] [--device cuda]

The peers are torch.optim.AdamW with its fused kernel and with foreach, and the Bernoulli way, made again from
its description: a tensor of probabilities for each gradient, torch.bernoulli on it, the gradient multiplied
in place. All take their steps in turn, so that a busy moment of the machine meets all of them; a ratio is the
median over the rounds of the ratios within a round.
Exits with 1 if a limit that the project promises is broken.
"""

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
from torch import nn

from benchmarks.machine import describe, limits, options, table
from fsdp_utils import ChildTuningAdamW

SHAPES = {"20 of 1024 x 1024": (20, 1024), "1000 of 64 x 64": (1000, 64)}
LIMITS = {"cpu": {"mode F": 1.5, "mode D": 1.1}, "cuda": {"mode F": 1.3, "mode D": 1.1}}
P = 0.3


def parameters(number: int, side: int, device: str) -> list[nn.Parameter]:
    made = [nn.Parameter(torch.randn(side, side, device=device)) for _ in range(number)]
    for p in made:
        p.grad = torch.randn_like(p)
    return made


def bernoulli_way(params: list[nn.Parameter]) -> Callable[[], None]:
    """Mode F as in 2022; what the mask keeps is divided by p."""
    optimizer = torch.optim.AdamW(params, fused=True)
    gradients = [p.grad.clone() for p in params if p.grad is not None]

    def step() -> None:
        for p, gradient in zip(params, gradients, strict=True):
            mask = torch.bernoulli(torch.full_like(gradient, P))
            assert p.grad is not None
            torch.mul(gradient, mask, out=p.grad)  # out: so that the next step has a gradient, too
            p.grad /= P
        optimizer.step()

    return step


def ways(number: int, side: int, device: str) -> dict[str, Callable[[], object]]:
    """Each on parameters of its own."""

    def named() -> list[tuple[str, nn.Parameter]]:
        return [(str(i), p) for i, p in enumerate(parameters(number, side, device))]

    task = named()
    masks = {name: torch.rand_like(p) < P for name, p in task}
    return {
        "AdamW, fused": torch.optim.AdamW(parameters(number, side, device), fused=True).step,
        "AdamW, foreach": torch.optim.AdamW(parameters(number, side, device), foreach=True).step,
        "mode F": ChildTuningAdamW(parameters(number, side, device), reserve_p=P).step,
        "mode D": ChildTuningAdamW(task, mode="task", gradient_mask=masks).step,
        "mode F, the Bernoulli way": bernoulli_way(parameters(number, side, device)),
    }


def measure(steps: dict[str, Callable[[], object]], rounds: int, device: str) -> dict[str, list[float]]:
    """Seconds of each step, by way."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for round_number in range(rounds + 2):  # the first two warm up
        for name, step in steps.items():
            if device == "cuda":
                torch.cuda.synchronize()
            began = time.perf_counter()
            step()
            if device == "cuda":
                torch.cuda.synchronize()
            if round_number >= 2:
                seconds[name].append(time.perf_counter() - began)
    return seconds


def ratios(seconds: dict[str, list[float]]) -> dict[str, float]:
    """Each way against AdamW's fused step of the same round."""
    base = seconds["AdamW, fused"]
    return {
        name: statistics.median(own / other for own, other in zip(each, base, strict=True))
        for name, each in seconds.items()
    }


def main() -> int:
    asked = options(__doc__, rounds=15, threads=1, device="cpu")
    if asked.device == "cpu":
        torch.set_num_threads(asked.threads)
    print(describe())
    if asked.device == "cuda":
        print(torch.cuda.get_device_name())
    print(f"milliseconds per step; {asked.rounds} rounds, all ways in turn; ratios to the fused AdamW\n")
    held = {}
    for shapes, (number, side) in SHAPES.items():
        seconds = measure(ways(number, side, asked.device), asked.rounds, asked.device)
        ratio = ratios(seconds)
        rows = [
            [
                name,
                f"{statistics.median(each) * 1e3:.1f}",
                f"{min(each) * 1e3:.1f}-{max(each) * 1e3:.1f}",
                f"{ratio[name]:.2f}",
            ]
            for name, each in seconds.items()
        ]
        print(table([shapes, "median", "range", "ratio"], rows), end="\n\n")
        for name, limit in LIMITS[asked.device].items():
            held[f"{shapes}: {name} at {ratio[name]:.2f} (limit {limit})"] = ratio[name] <= limit
    return limits(held)


if __name__ == "__main__":
    sys.exit(main())
