"""What does record_collectives add to a training step?

    python benchmarks/collectives.py [--starts 15] [--steps 100] [--ranks 2]

Trains a small transformer under FSDP2, FSDP1 and DDP, with and without the recording in turn. The batch is
the smallest one with which most steps take 20 ms. Blocks of one step count entering and leaving the block in
full; blocks of five show the cost of a step.

The same code costs 0 to 16% of a step from one start of two ranks to the next, and stays so. So the ranks are
started anew many times; the result is the median over the starts of their own medians over pairs, the time
with the recording against that without it. Exits with 1 if a result is more than 1.10.
"""

import statistics
import sys
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel

from benchmarks.machine import describe, options, table
from fsdp_utils import record_collectives, run_on_ranks

COST = 1.10  # the limit: with the recording, against without
STEP_S = 0.020  # for steps of at least that
WIDTH, LAYERS, LENGTH = 64, 2, 16


class Measured(NamedTuple):
    plain_s: float  # a block without the recording, in the median over pairs
    recorded_s: float  # with it
    ratio: float
    batch: int  # sequences
    events: int  # in a block


def build(way: str) -> nn.Module:
    torch.manual_seed(0)
    layers = nn.ModuleList(
        nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True) for _ in range(LAYERS)
    )
    model = nn.Sequential(*layers, nn.Flatten(0, 1), nn.Linear(WIDTH, 100))  # torch warns of a view
    if way == "FSDP2":
        for layer in layers:
            fully_shard(layer)
        fully_shard(model)
        return model
    if way == "FSDP1":
        policy = ModuleWrapPolicy({nn.TransformerEncoderLayer})
        return FSDP(model, auto_wrap_policy=policy, device_id=torch.device("cpu"))
    return DistributedDataParallel(model)


def measure(way: str, steps: int, pairs: int, batch: int) -> Measured:
    """On each rank: so many steps in each block, so many pairs of blocks, and at least that batch."""
    torch.set_num_threads(1)
    model = build(way)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def train(x: torch.Tensor, steps: int = 1) -> float:
        began = time.perf_counter()
        for _ in range(steps):
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return time.perf_counter() - began

    x = long_enough(train, batch)
    blocks: list[tuple[float, float]] = []
    events = 0
    for turn in range(-3, pairs):  # the first ones warm up
        plain = train(x, steps) if turn % 2 else 0.0
        began = time.perf_counter()
        with record_collectives(model) as trace:
            train(x, steps)
        recorded = time.perf_counter() - began
        events = len(trace.events)
        blocks.append((plain or train(x, steps), recorded))
    plain, recorded = map(statistics.median, zip(*blocks[3:], strict=True))
    ratio = statistics.median(with_it / without for without, with_it in blocks[3:])
    return Measured(plain, recorded, ratio, len(x), events)


def long_enough(train: Callable[[torch.Tensor], float], batch: int) -> torch.Tensor:
    """The smallest batch, from the given one on, with which most steps take 20 ms on rank 0."""
    while True:
        x = torch.randn(batch, LENGTH, WIDTH)
        lower_quartile = torch.tensor(statistics.quantiles((train(x) for _ in range(40)), n=4)[0])
        dist.broadcast(lower_quartile, 0)
        if lower_quartile >= STEP_S:
            return x
        batch += 1 + batch // 4


def main() -> int:
    asked = options(__doc__, starts=15, steps=100, ranks=2)
    print(describe())
    print(f"rank 0 of {asked.ranks}: {asked.starts} starts, {asked.steps} steps of each kind in each\n")
    rows, good = [], True
    for way, steps in product(("FSDP2", "FSDP1", "DDP"), (1, 5)):
        starts: list[Measured] = []
        for _ in range(asked.starts):
            given = (way, steps, asked.steps // steps, starts[0].batch if starts else 1)
            starts.append(run_on_ranks(measure, *given, world_size=asked.ranks, timeout=300)[0])
        plain, recorded, cost, batch, events = map(statistics.median_low, zip(*starts, strict=True))
        held = cost <= COST and plain / steps >= STEP_S
        good = good and held
        each = sorted(start.ratio for start in starts)
        times = [f"{1e3 * seconds / steps:.1f}" for seconds in (plain, recorded)]
        spread = f"{each[0]:.2f}-{each[-1]:.2f}"
        rows.append([way, steps, batch, events // steps, *times, f"{cost:.3f}", spread])
        rows[-1].append("held" if held else "BROKEN")
    head = "way, steps in a block, batch, events of a step, plain ms, recorded ms, ratio, of starts"
    print(table([*head.split(", "), f"<= {COST}"], rows))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
