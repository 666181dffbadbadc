"""What does check_in_step add to a training step?

    python benchmarks/in_step.py [--starts 5] [--pairs 40] [--ranks 2]

Trains the model of benchmarks/collectives.py under FSDP2, with a batch whose steps take 20 ms or more, in
blocks of ten steps with and without check_in_step in turn. The block is entered once for a whole training, so
entering and leaving it are not counted. The result is the median over the starts of the ranks of their own
medians over pairs, the time with the check against that without it. Exits with 1 if it is more than 1.05.
"""

import statistics
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from benchmarks.machine import describe, options
from fsdp_utils import check_in_step, run_on_ranks
from fsdp_utils.collectives.c10d_hooks import Call, listen_to_calls

COST = 1.05  # the limit: with the check, against without
STEP_S = 0.020  # for steps of at least that
WIDTH, LAYERS, STEPS = 256, 8, 10


def measured(pairs: int) -> tuple[list[float], float, int]:
    """The ratio of each pair, the seconds of a step without the check, and the collectives of a step."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)])
    for part in [*model, model]:
        fully_shard(part, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())

    def step(batch: int) -> None:
        model(torch.randn(batch, WIDTH)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    def block(batch: int) -> float:
        dist.barrier()
        began = time.perf_counter()
        for _ in range(STEPS):
            step(batch)
        return time.perf_counter() - began

    batch = torch.tensor(16)
    block(int(batch))
    calls = 0

    def count(_call: Call, issue: Callable[[], Any]) -> Any:
        nonlocal calls
        calls += 1
        return issue()

    with listen_to_calls(count):
        step(int(batch))
    while int(batch) < 2**16:
        slowest = torch.tensor(min(block(int(batch)) for _ in range(3)) / STEPS)
        dist.all_reduce(slowest, dist.ReduceOp.MIN)
        if slowest >= STEP_S:
            break
        batch += batch // 2
    ratios, plain = [], []
    for number in range(pairs):
        seconds = {}
        for checked in (False, True) if number % 2 else (True, False):
            with ExitStack() as stack:
                if checked:
                    stack.enter_context(check_in_step())
                seconds[checked] = block(int(batch))
        ratios.append(seconds[True] / seconds[False])
        plain.append(seconds[False] / STEPS)
    return ratios, statistics.median(plain), calls


def main() -> None:
    asked = options(__doc__, starts=5, pairs=40, ranks=2)
    print(describe())
    medians, steps, calls = [], [], 0
    for _ in range(asked.starts):
        found = run_on_ranks(measured, asked.pairs, world_size=asked.ranks, timeout=600)
        medians.append(statistics.median(found[0][0]))
        steps.append(found[0][1])
        calls = found[0][2]
    cost, step_ms = statistics.median(medians), 1e3 * statistics.median(steps)
    print(
        f"check_in_step, {asked.ranks} ranks, FSDP2, {calls} collectives in a step of {step_ms:.1f} ms: "
        f"{cost:.3f} times the step without it (starts: {min(medians):.3f} to {max(medians):.3f}; at most "
        f"{COST} is allowed)"
    )
    sys.exit(cost > COST)


if __name__ == "__main__":
    main()
