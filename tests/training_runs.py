"""Runs of the training program within a test, and what they leave to read."""

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook

from fsdp_utils import checkpoints, load_distributed
from fsdp_utils.train import DataConfig, OptimConfig, TrainConfig, main, parse, train
from tests import tiny_training
from tests.on_ranks import one_rank

STEPS = 40


def configured(out: Path, source: str = "counting", **changes: Any) -> TrainConfig:
    """A short run of a function of tests/tiny_training.py; each setting by its own name."""
    data = DataConfig(f"tests.tiny_training:{source}", batch_size=8)
    config = TrainConfig(str(out), data, optim=OptimConfig(lr=0.01, warmup=2), steps=STEPS)
    config.save_every, config.eval_every, config.keep = 2, 3, 9
    config.hang_s, config.timeout_s = 20.0, 30.0
    parts = (config, config.data, config.model, config.optim, config.parallel)
    for name, value in changes.items():
        (part,) = [part for part in parts if hasattr(part, name)]
        setattr(part, name, value)
    return config


def lines(file: Path) -> list[dict[str, Any]]:
    """Of a file that may just be written to, or not be there yet."""
    text = file.read_text() if file.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def metrics(out: Path, name: str = "loss") -> dict[int, float]:
    """By step; no step may be told twice."""
    found = [(line["step"], line[name]) for line in lines(out / "metrics.jsonl") if name in line]
    assert len(dict(found)) == len(found)
    return dict(found)


def events(out: Path, kind: str) -> list[dict[str, Any]]:
    return [line for line in lines(out / "events.jsonl") if line["event"] == kind]


def saved(out: Path) -> dict[int, Path]:
    return checkpoints(out / "checkpoints")


def run(out: Path, source: str = "counting", **changes: Any) -> dict[int, float]:
    """Train on the ranks that are there: the losses."""
    train(configured(out, source, **changes))
    return metrics(out)


def alone(out: Path, source: str = "counting", **changes: Any) -> dict[int, float]:
    """Train as a single rank: the losses."""
    with one_rank():
        return run(out, source, **changes)


def undisturbed_losses(out: Path, steps: int) -> dict[int, float]:
    """Those of the program's own settings, on ranks that have imported all of it."""
    train(parse([f"--out={out}", f"--steps={steps}", "--data.source=tests.tiny_training:counting"]))
    return metrics(out)


def program(*arguments: str) -> int:
    """The exit code of the program, run in this process, which may go on after it."""
    try:
        return main([*arguments])
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


@contextlib.contextmanager
def after_step(step: int, act: Callable[[], object]) -> Iterator[None]:
    """Call `act` in a run, when the optimizer has made so many steps in this process."""
    count = 0

    def made(*_: object) -> None:
        nonlocal count
        count += 1
        if count == step:
            act()

    hook = register_optimizer_step_post_hook(made)
    try:
        yield
    finally:
        hook.remove()


def saved_optimizer(out: Path) -> torch.optim.Optimizer:
    """An optimizer with the state of a run's newest checkpoint, in this process alone."""
    model = tiny_training.counting().build()
    optimizer = torch.optim.AdamW(model.parameters())
    load_distributed(out / "checkpoints", model, optimizer)
    return optimizer
