"""The settings of a training run: typed, from the command line and YAML, checked before anything starts.

    torchrun --nproc-per-node 2 -m fsdp_utils.train --config run.yaml --steps 500 --optim.lr 1e-4

Later arguments override earlier ones. `--print_config` writes the YAML of a run, `--help` explains each
setting.
"""

import contextlib
import io
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, Literal

from fsdp_utils._commands import VERSION
from fsdp_utils._extras import need

_MAY_BE_NONE = {"data.micro_batch", "optim.clip"}


class ConfigError(ValueError):
    """A setting that a run cannot have: names the setting, what was expected and what was found."""


@dataclass
class ModelConfig:
    """The model. With neither setting it is the one that the data's function returns.

    Args:
        config: a transformers configuration, a file or a folder; the seed of the run gives the weights.
        pretrained: a folder that save_pretrained wrote: its configuration and its weights.
    """

    config: str | None = None
    pretrained: str | None = None


@dataclass
class DataConfig:
    """The training data.

    Args:
        source: "module:function", called without arguments, for an object as those in
            `fsdp_utils.lessons.tasks`. Its `train` and `test` are dicts of tensors by name, a row for each
            sample, or datasets of such dicts, with `labels` that are -100 for what is left out.
            `predicts_next` is true for a decoder, whose output at a position is about the next label.
            `build()` makes a model of one's own, which returns a NamedTuple or a dict with `.loss`.
        batch_size: samples in a step, over all ranks. It stays the same on any number of ranks.
        micro_batch: the most samples that a rank computes at once, accumulating gradients; None for all.
    """

    source: str
    batch_size: int = 24
    micro_batch: int | None = None


@dataclass
class OptimConfig:
    """The optimizer, torch's AdamW, and its schedule.

    Args:
        lr: the learning rate after the warm-up.
        betas: of Adam's two moments.
        weight_decay: as in AdamW.
        warmup: steps in which the rate grows from 0, linearly.
        decay: how it falls after that, until the last step: "cosine", "linear" or "none".
        min_lr: where it ends, in parts of lr.
        clip: the largest norm of the whole gradient; None leaves it as it is.
    """

    lr: float = 3e-4
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.1
    warmup: int = 0
    decay: Literal["cosine", "linear", "none"] = "cosine"
    min_lr: float = 0.1
    clip: float | None = 1.0


@dataclass
class ParallelConfig:
    """Settings of sharding, precision and device.

    Args:
        strategy: as for fsdp_utils.shard; with "hybrid" the ranks of each host share one replica.
        precision: "bf16" computes in bf16, and keeps and reduces in fp32.
        recompute: keep only the input of each block, and compute its activations again in backward.
        compile: the backend of torch.compile for each block, such as "inductor"; None does not compile.
        device: "auto" is the accelerator, where there is one.
    """

    strategy: Literal["full", "grad_op", "hybrid"] = "full"
    precision: Literal["fp32", "bf16"] = "fp32"
    recompute: bool = False
    compile: str | None = None
    device: Literal["auto", "cpu"] = "auto"


@dataclass
class TrainConfig:
    """One run of `fsdp_utils.train`.

    Args:
        out: the run's directory, the same for all ranks: checkpoints, metrics, events. A run resumes from
            what it finds there.
        data, model, optim, parallel: the sections above.
        steps: of the optimizer.
        seed: of weights, order of samples and dropout.
        log_every: steps between lines of metrics.jsonl.
        eval_every: steps between evaluations; the last step is evaluated in any case.
        save_every: steps between checkpoints; the last step is saved in any case.
        keep: how many checkpoints are kept.
        hang_s: a rank that has not moved for so long hangs. Longer than any step but the first, and any save.
        timeout_s: the same for the start and the first step; and how long a rank waits in a collective.
    """

    out: str
    data: DataConfig
    model: ModelConfig = field(default_factory=ModelConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    steps: int = 100
    seed: int = 0
    log_every: int = 1
    eval_every: int = 50
    save_every: int = 50
    keep: int = 2
    hang_s: float = 300.0
    timeout_s: float = 600.0


def parse(arguments: list[str] | None = None) -> TrainConfig:
    """Read the configuration from command-line arguments; None reads sys.argv.

    Raises:
        ConfigError: an unknown setting, a value of another type, a value out of its range, a missing file.
        SystemExit: for --help, --version and --print_config, with 0.
    """
    jsonargparse = need("jsonargparse", "train")
    parser = jsonargparse.ArgumentParser(prog="fsdp_utils.train", exit_on_error=False, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=VERSION, help="show the version and exit")
    parser.add_argument("--config", action="config", help="a YAML file of the settings below")
    parser.add_class_arguments(TrainConfig)
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # the error says it all
            found = parser.instantiate(parser.parse_args(arguments))
    except (jsonargparse.ArgumentError, TypeError, ValueError, OSError) as error:
        raise ConfigError(f"configuration: {error}") from error
    config = TrainConfig(**{name: getattr(found, name) for name in TrainConfig.__dataclass_fields__})
    check(config)
    return config


def check(config: TrainConfig) -> None:
    """Raise ConfigError for the first value that a run cannot have."""
    counts = "steps log_every eval_every save_every keep data.batch_size data.micro_batch"
    positive = "hang_s timeout_s optim.lr optim.clip"
    checks: list[tuple[str, Callable[[Any], bool], str]] = [
        ("out data.source", bool, "a name"),
        (counts, lambda value: value >= 1, "at least 1"),
        (positive, lambda value: 0 < value < math.inf, "greater than 0 and finite"),
        ("optim.min_lr", lambda value: 0 <= value <= 1, "from 0 to 1"),
        ("optim.warmup", lambda value: 0 <= value <= config.steps, f"from 0 to steps ({config.steps})"),
    ]
    for names, is_right, wanted in checks:
        for name in names.split():
            value = attrgetter(name)(config)
            if value is None and name in _MAY_BE_NONE:
                continue
            if value is None or not is_right(value):
                raise ConfigError(f"configuration: expected {name} to be {wanted}, found {value!r}")
    if config.model.config and config.model.pretrained:
        raise ConfigError("configuration: expected model.config or model.pretrained, found both")


def micro_batches(config: TrainConfig, world_size: int) -> tuple[int, int]:
    """Return the number of micro-batches of a rank in a step, and the number of samples in each."""
    own, left = divmod(config.data.batch_size, world_size)
    if left:
        raise ConfigError(
            f"configuration: expected data.batch_size to be a multiple of the {world_size} ranks, found "
            f"{config.data.batch_size}; {(own + 1) * world_size} is one"
        )
    most = min(config.data.micro_batch or own, own)
    size = next(size for size in range(most, 0, -1) if own % size == 0)
    return own // size, size
