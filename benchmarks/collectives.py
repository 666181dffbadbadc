"""What does record_collectives add to a training step?

    python benchmarks/collectives.py [--rounds 40] [--ranks 2]

Trains a small transformer under FSDP2, FSDP1 and DDP, one step recorded and one not, in turn. A step
without the recording is to take 20 ms or more; the table says what it took. Exits with 1 if the recording
costs more than 10%.
"""

import argparse
import statistics
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel

from benchmarks.machine import describe, table
from fsdp_utils import record_collectives, run_on_ranks

COST = 1.10  # the limit: with the recording, against without
STEP_S = 0.020  # for steps of at least that
WIDTH, LAYERS, BATCH, LENGTH = 128, 4, 4, 64


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


def measure(way: str, rounds: int) -> tuple[list[float], list[float], int]:
    """Seconds of steps without and with the recording, in turn, and how many events it had."""
    torch.set_num_threads(1)
    model = build(way)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    x = torch.randn(BATCH, LENGTH, WIDTH)
    seconds: dict[bool, list[float]] = {False: [], True: []}
    events = 0
    for turn in range(2 * rounds + 4):
        recorded = turn % 2 == 1
        began = time.perf_counter()
        context: Any = record_collectives(model) if recorded else nullcontext()
        with context as trace:
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        if turn >= 4:  # the first ones warm up
            seconds[recorded].append(time.perf_counter() - began)
            events = len(trace.events) if recorded else events
    return seconds[False], seconds[True], events


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--ranks", type=int, default=2)
    options = parser.parse_args()

    print(describe())
    print(f"milliseconds per step on rank 0 of {options.ranks}: medians of {options.rounds}, in turn\n")
    rows, good = [], True
    for way in ("FSDP2", "FSDP1", "DDP"):
        per_rank = run_on_ranks(measure, way, options.rounds, world_size=options.ranks, timeout=300)
        plain, recorded, events = per_rank[0]
        ratio = statistics.median(recorded) / statistics.median(plain)
        held = ratio <= COST and statistics.median(plain) >= STEP_S
        good = good and held
        spread = f"{1e3 * min(plain):.1f}-{1e3 * max(plain):.1f}"
        medians = [f"{1e3 * statistics.median(times):.1f}" for times in (plain, recorded)]
        rows.append([way, *medians, f"{ratio:.3f}", spread, events, "held" if held else "BROKEN"])
    print(table(["way", "plain", "recorded", "ratio", "range of plain", "events", "ratio <= 1.10"], rows))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
