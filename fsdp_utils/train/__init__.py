"""A training program with FSDP2 that resumes after failures, from a laptop to a cluster.

`torchrun ... -m fsdp_utils.train --config run.yaml --out runs/a` trains, saves in the background, and resumes
from its newest checkpoint; `train(TrainConfig(...))` does it from Python. Uses the other rooms; none of them
imports it. Needs the extra [train].
"""

from typing import TYPE_CHECKING

from fsdp_utils._lazy import loader

if TYPE_CHECKING:
    from fsdp_utils.train.config import ConfigError as ConfigError
    from fsdp_utils.train.config import DataConfig as DataConfig
    from fsdp_utils.train.config import ModelConfig as ModelConfig
    from fsdp_utils.train.config import OptimConfig as OptimConfig
    from fsdp_utils.train.config import ParallelConfig as ParallelConfig
    from fsdp_utils.train.config import TrainConfig as TrainConfig
    from fsdp_utils.train.config import parse as parse
    from fsdp_utils.train.data import DataError as DataError
    from fsdp_utils.train.data import rows_at as rows_at
    from fsdp_utils.train.loop import Progress as Progress
    from fsdp_utils.train.loop import learning_rate as learning_rate
    from fsdp_utils.train.loop import main as main
    from fsdp_utils.train.loop import train as train
    from fsdp_utils.train.watchdog import NotFinite as NotFinite

# Of what lesson 10 reads: the program's own interface is its command line.
_MODULE_OF = {
    "ConfigError": "config",
    "DataConfig": "config",
    "DataError": "data",
    "ModelConfig": "config",
    "NotFinite": "watchdog",
    "OptimConfig": "config",
    "ParallelConfig": "config",
    "Progress": "loop",
    "TrainConfig": "config",
    "learning_rate": "loop",
    "main": "loop",
    "parse": "config",
    "rows_at": "data",
    "train": "loop",
}
__getattr__ = loader(__name__, _MODULE_OF)
