"""What does record_collectives add to a training step?

    python benchmarks/collectives.py [--rounds 1500] [--ranks 2]

Trains a small transformer under FSDP2, FSDP1 and DDP, steps with and without the recording in turn. It
measures where the recording is felt most: a block holds one step, so that entering and leaving it ("block" in
the table) counts in full, and the step is short, for the batch is the smallest one with which most steps take
20 ms. Exits with 1 if the median, over pairs of steps, of the time with the recording against that without it
is more than 1.10.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
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

from benchmarks.machine import describe, table
from fsdp_utils import record_collectives, run_on_ranks

COST = 1.10  # the limit: with the recording, against without
STEP_S = 0.020  # for steps of at least that
WIDTH, LAYERS, LENGTH = 64, 2, 16


class Measured(NamedTuple):
    """Seconds of steps without and with the recording, in pairs, and of entering and leaving the block.

    Args:
        plain, recorded, block: One for each pair of steps.
        batch: Sequences in it.
        events: How many a step had.
    """

    plain: list[float]
    recorded: list[float]
    block: list[float]
    batch: int
    events: int


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


def measure(way: str, rounds: int) -> Measured:
    """On each rank."""
    torch.set_num_threads(1)
    model = build(way)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def step(x: torch.Tensor) -> float:
        began = time.perf_counter()
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        return time.perf_counter() - began

    x = long_enough(step)
    measured, events = Measured([], [], [], len(x), 0), 0
    for turn in range(-3, rounds):  # the first ones warm up
        plain = step(x) if turn % 2 else 0.0
        began = time.perf_counter()
        with record_collectives(model) as trace:
            inside = step(x)
        recorded = time.perf_counter() - began
        plain, events = plain or step(x), len(trace.events)
        if turn >= 0:
            measured.plain.append(plain)
            measured.recorded.append(recorded)
            measured.block.append(recorded - inside)
    return measured._replace(events=events)


def long_enough(step: Callable[[torch.Tensor], float]) -> torch.Tensor:
    """The smallest batch with which most steps take 20 ms on rank 0."""
    batch = 1
    while True:
        x = torch.randn(batch, LENGTH, WIDTH)
        lower_quartile = torch.tensor(statistics.quantiles((step(x) for _ in range(40)), n=4)[0])
        dist.broadcast(lower_quartile, 0)
        if lower_quartile >= STEP_S:
            return x
        batch += 1 + batch // 4


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=1500)
    parser.add_argument("--ranks", type=int, default=2)
    options = parser.parse_args()

    print(describe())
    print(f"one step in each block, rank 0 of {options.ranks}: medians of {options.rounds} pairs of steps\n")
    rows, good = [], True
    for way in ("FSDP2", "FSDP1", "DDP"):
        seen = run_on_ranks(measure, way, options.rounds, world_size=options.ranks, timeout=300)[0]
        low, ratio, high = statistics.quantiles(
            (recorded / plain for plain, recorded in zip(seen.plain, seen.recorded, strict=True)), n=4
        )
        plain, recorded = (statistics.median(seconds) for seconds in (seen.plain, seen.recorded))
        held = ratio <= COST and plain >= STEP_S
        good = good and held
        rows.append(
            [
                way,
                seen.batch,
                seen.events,
                f"{1e3 * plain:.1f}",
                f"{1e3 * recorded:.1f}",
                f"{1e3 * statistics.median(seen.block):.1f}",
                f"{ratio:.3f}",
                f"{low:.2f}-{high:.2f}",
                "held" if held else "BROKEN",
            ]
        )
    head = [
        "way",
        "batch",
        "events",
        "plain ms",
        "recorded ms",
        "block ms",
        "ratio",
        "quartiles",
        f"<= {COST}",
    ]
    print(table(head, rows))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
