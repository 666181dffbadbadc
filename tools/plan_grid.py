"""Compute the grid of lesson 14's sliders: how many GPUs, how much memory, how long a step?

    python tools/plan_grid.py [MODEL ...]

Writes notebooks/plan_grid.json; models that are not named keep their numbers. `plan()` takes a
second or more, and the grid has thousands of points. So `plan()` computes a few for each model, strategy,
checkpointing and with or without accumulation; the others follow from these by a closed form:

- Memory of each part of the step, by category: a constant, plus a share of 1 / ranks for what is sharded
  among all of them, plus a share of the tokens of a micro-batch. The peak is that of the highest part.
- Computation: a constant, plus a share of the tokens, plus a share of tokens times sequence (attention).
- A collective: what does not depend on the ranks, plus the planner's own time of a ring (`collective_s`).
- Who waits for whom: the replay that the planner itself uses. Each micro-batch beyond the second takes as
  long as a first one.

What the allocator reserves beyond that has no closed form, and is left out.

tests/test_plan_grid.py holds points of both kinds to `plan()`, so that a planner that changed is noticed.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parent.parent))

from transformers import LlamaConfig

from fsdp_utils import plan
from fsdp_utils.collectives.events import COMPUTE, StepEvent
from fsdp_utils.collectives.replay import Replay, replay
from fsdp_utils.planner import GPUS, Plan
from fsdp_utils.planner.efficiency import of_gpu
from fsdp_utils.planner.roofline import collective_s
from fsdp_utils.planner.work_items import Send

PATH = Path(__file__).parent.parent / "notebooks/plan_grid.json"
GPU, PER_HOST = "A100-80", 8
SIZES = "hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads vocab_size"
MODELS: dict[str, dict[str, Any]] = {
    name: dict(zip(SIZES.split(), sizes, strict=True))
    for name, sizes in {
        "Llama 3.2 1B": (2048, 8192, 16, 32, 8, 128256),
        "Llama 2 7B": (4096, 11008, 32, 32, 32, 32000),
        "Llama 3 70B": (8192, 28672, 80, 64, 8, 128256),
    }.items()
}
MODELS["Llama 3.2 1B"]["tie_word_embeddings"] = True
STRATEGIES = ("full", "grad_op", "hybrid")
CHECKPOINTING = ("none", "selective", "full")
RANKS = (8, 16, 32, 64, 256, 1024)
BATCH = (1, 2, 4)  # samples of a rank in a micro-batch
LENGTH = (2048, 4096, 8192)
MICRO_BATCHES = (1, 2, 8)
PARTS = {  # how the figure sums up the planner's categories
    "parameters": ("parameters",),
    "gradients": ("gradients",),
    "optimizer state": ("optimizer state",),
    "gathered parameters, with buffers": ("gathered parameters", "buffers of all-gathers"),
    "whole gradients, with buffers": ("whole gradients", "buffers of reductions"),
    "activations and the rest": ("activations", "temporaries", "inputs", "buffers"),
}


class At(NamedTuple):
    """Ranks, samples of a rank in a micro-batch, tokens of a sample."""

    ranks: int
    batch: int
    length: int


def corners(strategy: str) -> tuple[At, At, At, At]:
    """What `plan()` computes: the first, more ranks, more samples, longer samples."""
    few, many = (16, 128) if strategy == "hybrid" else (8, 64)  # hybrid needs two hosts
    return At(few, 1, 2048), At(many, 1, 2048), At(few, 4, 2048), At(few, 1, 8192)


def planned(model: str, strategy: str, checkpointing: str, at: At, micro_batches: int) -> Plan:
    """The planner's own answer."""
    return plan(
        LlamaConfig(**MODELS[model]),
        world_size=at.ranks,
        batch_size=at.ranks * at.batch * micro_batches,
        seq_len=at.length,
        gpu=GPU,
        strategy=strategy,
        checkpointing=None if checkpointing == "none" else checkpointing,
        micro_batches=micro_batches,
        ranks_per_host=PER_HOST,
    )


class Corner(NamedTuple):
    """What the closed form needs of a plan."""

    at: At
    moments: list[dict[str, float]]  # GiB by part of the figure, for each part of the steps
    events: list[StepEvent]


def by_part(gib: dict[str, float]) -> dict[str, float]:
    return {part: sum(gib.get(kind, 0.0) for kind in kinds) for part, kinds in PARTS.items()}


class Form:
    """The closed form of a model, strategy and checkpointing, from corners with one and two micro-batches."""

    def __init__(self, strategy: str, one: list[Corner], two: list[Corner]) -> None:
        self._strategy, self._corners = strategy, {1: one, 2: two}
        for part in (one, two):
            assert len({len(found.moments) for found in part}) == 1
            assert len({tuple((e.kind, e.module, e.phase) for e in found.events) for found in part}) == 1

    def memory(self, at: At, micro_batches: int) -> dict[str, float]:
        """GiB by part at the peak."""
        first, ranks, samples, _ = self._corners[min(micro_batches, 2)]
        shards = self._shards(at, first, ranks)
        tokens = (at.batch * at.length / 2048 - 1) / 3

        def value(low: float, more_ranks: float, more_tokens: float) -> float:
            return low + (more_ranks - low) * shards + (more_tokens - low) * tokens

        moments = [
            {part: max(value(a[part], b[part], c[part]), 0.0) for part in PARTS}
            for a, b, c in zip(first.moments, ranks.moments, samples.moments, strict=True)
        ]
        return max(moments, key=lambda moment: sum(moment.values()))

    def _shards(self, at: At, first: Corner, ranks: Corner) -> float:
        """How far 1 / ranks is on the way from the one corner to the other; hybrid shards within a host."""
        if self._strategy == "hybrid":
            return 0.0
        low, high = 1 / first.at.ranks, 1 / ranks.at.ranks
        return (1 / at.ranks - low) / (high - low)

    def seconds(self, at: At, micro_batches: int) -> tuple[float, float]:
        """Of a step, and of it those in which something is sent and nothing computed."""
        step = self._replay(at, min(micro_batches, 2))
        more = micro_batches - 2
        if more <= 0:
            return step.step_s, step.exposed_s
        first = self._replay(at, 1, without_update=True)
        return step.step_s + more * first.step_s, step.exposed_s + more * first.exposed_s

    def _replay(self, at: At, micro_batches: int, *, without_update: bool = False) -> Replay:
        rows = zip(*(found.events for found in self._corners[micro_batches]), strict=True)
        events = [
            replace(row[0], seconds=self._event_s(at, micro_batches, row))
            for row in rows
            if not (without_update and row[0].phase == "optimizer")
        ]
        return replay(events, limit_units=2)

    def _event_s(self, at: At, micro_batches: int, row: tuple[StepEvent, ...]) -> float:
        event = row[0]
        first, ranks, samples, longer = (corner.seconds or 0.0 for corner in row)
        low, high, *_ = self._corners[micro_batches]
        if event.is_collective:
            # what is beside the ring, such as copies, does not depend on the ranks; the bytes follow
            empty = [self._ring(event, corner.at.ranks, 0) for corner in (low, high)]
            of_gib = [self._ring(event, corner.at.ranks, 2**30) for corner in (low, high)]
            gib_s = [full - none for full, none in zip(of_gib, empty, strict=True)]
            if abs(gib_s[1] - gib_s[0]) < 1e-9:  # within a host: the same on any number of hosts
                return first
            gib = (ranks - first - (empty[1] - empty[0])) / (gib_s[1] - gib_s[0])
            beside = first - empty[0] - gib * gib_s[0]
            return beside + self._ring(event, at.ranks, round(gib * 2**30))
        if event.kind != COMPUTE:
            return 0.0
        # a + b tokens + c tokens length, in units of 2048: (1, 1), (4, 4), (4, 16)
        attention = (longer - samples) / 12
        linear = (samples - first) / 3 - attention
        constant = first - linear - attention
        tokens, length = at.batch * at.length / 2048, at.length / 2048
        update = (ranks - first) * self._shards(at, low, high)  # the optimizer's, which is sharded
        return constant + linear * tokens + attention * tokens * length + update

    def _ring(self, event: StepEvent, ranks: int, nbytes: int) -> float:
        """The planner's time of a collective of that kind, on so many ranks in all."""
        size, per_host = ranks, min(ranks, PER_HOST)
        if self._strategy == "hybrid":
            size, per_host = (ranks // PER_HOST, 1) if event.kind == "all_reduce" else (PER_HOST, PER_HOST)
        send = Send(event.kind, "", nbytes, size, per_host)
        return collective_s(send, GPUS[GPU], min(ranks, PER_HOST), of_gpu(GPU))


def points() -> Iterator[tuple[At, int]]:
    """Of one model, strategy and checkpointing, in the order of the grid."""
    for ranks, batch, length, micro_batches in product(RANKS, BATCH, LENGTH, MICRO_BATCHES):
        yield At(ranks, batch, length), micro_batches


def is_planned(strategy: str, at: At, micro_batches: int) -> bool:
    """Did `plan()` compute this point itself?"""
    return at in corners(strategy) and micro_batches <= 2


def numbers(form: Form, at: At, micro_batches: int) -> list[float]:
    """GiB of each part, seconds of a step, and % of it in which a rank only sends; four digits."""
    step, only_sends = form.seconds(at, micro_batches)
    found = [*form.memory(at, micro_batches).values(), step, 100 * only_sends / step]
    return [float(f"{number:.4g}") for number in found]


def form_of(model: str, strategy: str, checkpointing: str) -> Form:
    both: tuple[list[Corner], list[Corner]] = [], []
    for (number, found), at in product(enumerate(both, 1), corners(strategy)):
        plan_ = planned(model, strategy, checkpointing, at, number)
        events = [span.event for span in plan_.timing.replay.spans]
        found.append(Corner(at, [by_part(moment.gib) for moment in plan_.moments], events))
    return Form(strategy, *both)


def key(model: str, strategy: str, checkpointing: str) -> str:
    return f"{model}, {strategy}, {checkpointing}"


def main() -> int:
    stored = json.loads(PATH.read_text(encoding="utf-8")) if PATH.exists() else {}
    grids = {}
    for model, strategy, checkpointing in product(MODELS, STRATEGIES, CHECKPOINTING):
        name = key(model, strategy, checkpointing)
        if sys.argv[1:] and model not in sys.argv[1:]:
            grids[name] = stored[name]
            continue
        form = form_of(model, strategy, checkpointing)
        grids[name] = [
            None if strategy == "hybrid" and at.ranks <= PER_HOST else numbers(form, at, micro_batches)
            for at, micro_batches in points()
        ]
        print(name, flush=True)
    lines = ",\n".join(
        f"{json.dumps(key)}:{json.dumps(rows, separators=(',', ':'))}" for key, rows in grids.items()
    )
    PATH.write_text(f"{{\n{lines}\n}}\n".replace(".0,", ",").replace(".0]", "]"), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
