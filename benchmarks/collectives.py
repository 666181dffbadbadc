"""What does record_collectives add to a training step?

    python benchmarks/collectives.py [--rounds 1500] [--ranks 2]

Trains a small transformer under FSDP2, FSDP1 and DDP, with and without the recording in turn. The steps are
short, where it is felt most: the batch is the smallest one with which most of them take 20 ms. Blocks of one
step are the dearest case, as entering and leaving the block ("block" in the table) counts in full; blocks of
five show what a step costs. Exits with 1 if a median over pairs of the time with the recording against that
without it is more than 1.10.
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
        plain, recorded, block: One for each pair of blocks.
        batch: Sequences in it.
        events: How many a block had.
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


def measure(way: str, steps: int, rounds: int) -> Measured:
    """On each rank: so many steps in each block, so many pairs of blocks."""
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

    x = long_enough(train)
    measured, events = Measured([], [], [], len(x), 0), 0
    for turn in range(-3, rounds):  # the first ones warm up
        plain = train(x, steps) if turn % 2 else 0.0
        began = time.perf_counter()
        with record_collectives(model) as trace:
            inside = train(x, steps)
        recorded = time.perf_counter() - began
        plain, events = plain or train(x, steps), len(trace.events)
        if turn >= 0:
            measured.plain.append(plain)
            measured.recorded.append(recorded)
            measured.block.append(recorded - inside)
    return measured._replace(events=events)


def long_enough(train: Callable[[torch.Tensor], float]) -> torch.Tensor:
    """The smallest batch with which most steps take 20 ms on rank 0."""
    batch = 1
    while True:
        x = torch.randn(batch, LENGTH, WIDTH)
        lower_quartile = torch.tensor(statistics.quantiles((train(x) for _ in range(40)), n=4)[0])
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
    print(f"rank 0 of {options.ranks}: medians over {options.rounds} pairs of steps\n")
    rows, good = [], True
    for way in ("FSDP2", "FSDP1", "DDP"):
        for steps in (1, 5):
            pairs = options.rounds // steps
            seen = run_on_ranks(measure, way, steps, pairs, world_size=options.ranks, timeout=300)[0]
            low, ratio, high = statistics.quantiles(
                (recorded / plain for plain, recorded in zip(seen.plain, seen.recorded, strict=True)), n=4
            )
            plain, recorded = (statistics.median(seconds) / steps for seconds in (seen.plain, seen.recorded))
            held = ratio <= COST and plain >= STEP_S
            good = good and held
            rows.append(
                [
                    way,
                    steps,
                    seen.batch,
                    seen.events // steps,
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
        "steps in a block",
        "batch",
        "events of a step",
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
