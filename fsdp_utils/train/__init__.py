"""A training program with FSDP2 that resumes after failures, from a laptop to a cluster.

`torchrun ... -m fsdp_utils.train --config run.yaml --out runs/a` trains, saves in the background, and resumes
from its newest checkpoint; `train(TrainConfig(...))` does it from Python. Uses the other rooms; none of them
imports it. Needs the extra [train].
"""

from fsdp_utils.train.config import (
    ConfigError,
    DataConfig,
    ModelConfig,
    OptimConfig,
    ParallelConfig,
    TrainConfig,
    parse,
)
from fsdp_utils.train.data import rows_at
from fsdp_utils.train.faults import NotFinite
from fsdp_utils.train.loop import Progress, learning_rate, main, train

__all__ = [
    "ConfigError",
    "DataConfig",
    "ModelConfig",
    "NotFinite",
    "OptimConfig",
    "ParallelConfig",
    "Progress",
    "TrainConfig",
    "learning_rate",
    "main",
    "parse",
    "rows_at",
    "train",
]
