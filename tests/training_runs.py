"""Runs of the training program within a test, and what they leave to read."""

import json
from pathlib import Path
from typing import Any

from fsdp_utils.train.config import DataConfig, OptimConfig, TrainConfig
from fsdp_utils.train.loop import train

STEPS = 40


def configured(out: Path, source: str = "counting", **changes: Any) -> TrainConfig:
    data = DataConfig(
        f"tests.tiny_training:{source}", batch_size=8, micro_batch=changes.pop("micro_batch", None)
    )
    optim = OptimConfig(lr=changes.pop("lr", 0.01), warmup=2, name=changes.pop("name", "adamw"))
    settings = {
        "steps": STEPS,
        "save_every": 2,
        "eval_every": 3,
        "keep": 9,
        "hang_s": 20.0,
        "timeout_s": 30.0,
    }
    return TrainConfig(str(out), data, optim=optim, **{**settings, **changes})


def metrics(out: Path, name: str = "loss") -> dict[int, float]:
    """By step; no step may be told twice."""
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    found = [(line["step"], line[name]) for line in lines if name in line]
    assert len(dict(found)) == len(found)
    return dict(found)


def events(out: Path) -> list[str]:
    return [json.loads(line)["event"] for line in (out / "events.jsonl").read_text().splitlines()]


def run(out: Path, source: str = "counting", **changes: Any) -> dict[int, float]:
    train(configured(out, source, **changes))
    return metrics(out)
