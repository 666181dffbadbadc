"""The settings of a training run: typed, from the command line and YAML, checked before anything starts.

    torchrun --nproc-per-node 2 -m fsdp_utils.train --config run.yaml --steps 500 --optim.lr 1e-4

Later arguments override earlier ones. `--print_config` writes the YAML of a run, `--help` explains each
setting.
"""

import contextlib
import io
import json
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, is_dataclass
from operator import attrgetter
from typing import Any, Literal, get_args, get_type_hints

from fsdp_utils._commands import VERSION
from fsdp_utils._extras import need
from fsdp_utils._safe_yaml import YamlError, check_yaml
from fsdp_utils.checkpoint import CheckpointError
from fsdp_utils.checkpoint.files import local_path

__all__ = [
    "ConfigError",
    "DataConfig",
    "ModelConfig",
    "OptimConfig",
    "ParallelConfig",
    "TrainConfig",
    "changes",
    "check_ranges",
    "mesh_shape",
    "micro_batches",
    "parse",
]

_LOADER = "guarded yaml"  # jsonargparse's name for it
_LONGEST_S = 1e6  # that a wait can take: 11 days, as torch counts in milliseconds


class ConfigError(ValueError):
    """A setting that a run cannot have: names the setting, what was expected and what was found."""


@dataclass
class ModelConfig:
    """The model. With neither setting it is the one that the data's function returns.

    Args:
        config: a transformers configuration: a JSON file, a folder with a config.json, or one of the names in
            `fsdp_utils.train.model.NAMED`. The weights are drawn from the run's seed.
        pretrained: a folder that save_pretrained wrote: its configuration and its weights.
    """

    config: str | None = None
    pretrained: str | None = None


@dataclass
class DataConfig:
    """The training data.

    Args:
        source: "module:function", called without arguments, for an object with the tensors of `train` and
            `test` by name, as in `fsdp_utils.lessons.tasks`; or a folder of text: .npy files of token ids,
            .txt files.
            A model of one's own returns a NamedTuple or a dict with `.loss`: FSDP finds the tensors in these.
        batch_size: samples in a step, over all ranks. It stays the same on any number of ranks.
        micro_batch: the most samples that a rank computes at once; None for all that are its own. With less,
            gradients are accumulated.
        seq_len: tokens in a sample of a folder; at most the model's positions.
        tokenizer: for .txt files: a folder of a transformers tokenizer. None: a token is a byte (UTF-8).
        held_out: fraction of a folder's samples, evenly spread, that are kept for evaluation, to the nearest
            sample. At least one, unless the fraction is 0, and at least one is left to train on.
    """

    source: str
    batch_size: int = 24
    micro_batch: int | None = None
    seq_len: int = 512
    tokenizer: str | None = None
    held_out: float = 0.05


@dataclass
class OptimConfig:
    """The optimizer and its schedule.

    Args:
        name: "adamw" (fused) or "child_tuning" (ChildTuningAdamW, mode "taskfree").
        lr: the learning rate after the warm-up.
        betas: of Adam's two moments.
        weight_decay: as in AdamW.
        reserve_p: for "child_tuning": the fraction of each gradient that is kept.
        warmup: steps in which the rate grows from 0, linearly.
        decay: how it falls after that, until the last step: "cosine", "linear" or "none".
        min_lr: where it ends, in parts of lr.
        clip: the largest norm of the whole gradient; None leaves it as it is.
    """

    name: Literal["adamw", "child_tuning"] = "adamw"
    lr: float = 3e-4
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.1
    reserve_p: float = 0.3
    warmup: int = 0
    decay: Literal["cosine", "linear", "none"] = "cosine"
    min_lr: float = 0.1
    clip: float | None = 1.0


@dataclass
class ParallelConfig:
    """How the model is sharded, its precision, and its device.

    Args:
        strategy: as for fsdp_utils.shard.
        shard_ranks: for "hybrid": how many ranks share one replica of the model; None for those of a host.
        precision: "bf16" computes in bf16, and keeps and reduces in fp32.
        recompute: keep only the input of each block, and compute its activations again in backward.
        compile: the backend of torch.compile for each block, such as "inductor"; None does not compile.
        device: "auto" is the accelerator, where there is one.
    """

    strategy: Literal["full", "grad_op", "hybrid"] = "full"
    shard_ranks: int | None = None
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
        data: the training data.
        model: the model.
        optim: the optimizer and its schedule.
        parallel: sharding, precision and device.
        steps: of the optimizer.
        seed: of weights, order of samples and dropout.
        log_every: steps between lines of metrics.jsonl.
        eval_every: steps between evaluations; the last step is evaluated in any case.
        save_every: steps between checkpoints; the last step is saved in any case.
        keep: how many checkpoints are kept.
        tensorboard: write the metrics for TensorBoard, too.
        profile_step: the step of which torch.profiler writes a trace on rank 0.
        peak_tflops: of one device, for the MFU; None for what is known of the device.
        hang_s: a rank that has not moved for so long is taken to hang. Longer than any step but the first,
            any save, and any batch of an evaluation.
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
    tensorboard: bool = False
    profile_step: int | None = None
    peak_tflops: float | None = None
    hang_s: float = 300.0
    timeout_s: float = 600.0


def parse(arguments: list[str] | None = None) -> TrainConfig:
    """The configuration that the command line asks for; None reads sys.argv.

    Raises:
        ConfigError: an unknown setting, a value of another type, a value out of its range, a missing file.
        SystemExit: for --help, --version and --print_config, with 0.
    """
    jsonargparse = need("jsonargparse", "train")
    arguments = sys.argv[1:] if arguments is None else arguments
    _set_guarded_loader(jsonargparse)
    parser = jsonargparse.ArgumentParser(
        prog="fsdp_utils.train", exit_on_error=False, allow_abbrev=False, parser_mode=_LOADER
    )
    parser.add_argument("--version", action="version", version=VERSION, help="show the version and exit")
    parser.add_argument("--config", action="config", help="a YAML file of the settings below")
    parser.add_class_arguments(TrainConfig)
    usage = io.StringIO()
    try:
        for argument in arguments:
            name, _, value = argument.partition("=") if argument.startswith("--") else ("", "", argument)
            _check_texts(value, name or "command line")
        with contextlib.redirect_stderr(usage):
            found = parser.instantiate(parser.parse_args(arguments))
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"configuration: expected YAML in UTF-8, found a file that is not: {error}"
        ) from error
    except (jsonargparse.ArgumentError, TypeError, ValueError, OSError) as error:
        raise ConfigError(f"configuration: {error}") from error
    settings = {name: getattr(found, name) for name in TrainConfig.__dataclass_fields__}
    config = TrainConfig(**settings)
    check_ranges(config)
    return config


def _set_guarded_loader(jsonargparse: Any) -> None:
    """jsonargparse's own YAML loader, after a check of what the YAML would expand to."""
    yaml, read = need("yaml", "train"), jsonargparse.get_loader("yaml")

    def load(text: str, path: str = "") -> Any:
        check_yaml(text, where=str(path) or "a value")
        found = read(text)
        _check_texts(found, str(path) or "a value")
        return found

    jsonargparse.set_loader(_LOADER, load, exceptions=(YamlError, yaml.YAMLError, ValueError))


def _check_texts(value: Any, where: str) -> None:
    """jsonargparse reads each text within a value as YAML again, and not with the loader above [4.53].

    Raises:
        YamlError: one would expand too far. What is no YAML stays text, and is fine.
        ConfigError: one holds a NUL, which no path and no name can.
    """
    if isinstance(value, str):
        if "\0" in value:
            raise ConfigError(f"configuration: expected text without a NUL in {where}, found {value!r:.80}")
        try:
            check_yaml(value, where=where)
        except YamlError as error:
            if not error.is_syntax:
                raise
    elif isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            _check_texts(each, where)


def check_ranges(config: TrainConfig) -> None:
    """Refuse numbers that a run cannot have.

    Raises:
        ConfigError: names the first that is not.
    """
    for name in _nulls(config):
        raise ConfigError(f"configuration: expected {name} to have a value, found null. Leave it out instead")
    checks: list[tuple[str, Callable[[Any], bool], str]] = [
        (
            "steps log_every eval_every save_every keep data.batch_size data.micro_batch "
            "parallel.shard_ranks profile_step",
            lambda value: value >= 1,
            "at least 1",
        ),
        ("data.seq_len", lambda value: value >= 2, "at least 2, as a token is predicted from those before"),
        ("hang_s timeout_s peak_tflops optim.lr optim.clip", lambda value: value > 0, "greater than 0"),
        ("hang_s timeout_s peak_tflops optim.lr optim.clip optim.weight_decay", math.isfinite, "finite"),
        ("hang_s timeout_s", lambda value: value <= _LONGEST_S, f"at most {_LONGEST_S:.0f}"),
        (
            "optim.betas",
            lambda betas: all(0 <= beta < 1 for beta in betas),
            "two numbers from 0 to 1, without 1",
        ),
        ("optim.weight_decay", lambda value: value >= 0, "at least 0"),
        ("seed", lambda value: -(2**63) <= value < 2**63, "a number of 64 bits, from -2^63 to 2^63 - 1"),
        ("out", bool, "the name of a directory"),
        ("out", _is_local, "a directory (no URL, as logs and locks lie there; no ~, which a shell reads)"),
        ("data.held_out", lambda value: 0 <= value < 1, "from 0 to 1, without 1"),
        ("optim.min_lr", lambda value: 0 <= value <= 1, "from 0 to 1"),
        ("optim.warmup", lambda value: 0 <= value <= config.steps, f"from 0 to steps ({config.steps})"),
        ("optim.reserve_p", lambda value: 0 < value <= 1, "greater than 0 and at most 1"),
    ]
    for names, is_right, wanted in checks:
        for name in names.split():
            value = attrgetter(name)(config)
            if value is not None and not is_right(value):
                raise ConfigError(f"configuration: expected {name} to be {wanted}, found {value!r}")
    both = (config.model.config, config.model.pretrained)
    if None not in both:
        raise ConfigError(
            f"configuration: expected one of model.config and model.pretrained to be left out, found {both!r}"
        )


def _is_local(path: str) -> bool:
    try:
        local_path(path)
    except CheckpointError:
        return False
    return True


def _nulls(settings: Any, prefix: str = "") -> Iterator[str]:
    """The settings that are None and must not be: jsonargparse lets null through everywhere."""
    for name, kind in get_type_hints(type(settings)).items():
        value = getattr(settings, name)
        if value is None and type(None) not in get_args(kind):
            yield prefix + name
        elif is_dataclass(value):
            yield from _nulls(value, f"{prefix}{name}.")


def changes(before: dict[str, Any], now: dict[str, Any], prefix: str = "") -> list[str]:
    """What differs between two configurations, as asdict gives them: "optim.lr 0.1 -> 0.2"."""
    found = []
    for name in before.keys() | now.keys():
        old, new = before.get(name), now.get(name)
        if isinstance(old, dict) and isinstance(new, dict):
            found += changes(old, new, f"{prefix}{name}.")
        elif json.dumps(old) != json.dumps(new):  # alike for tuples and lists
            found.append(f"{prefix}{name} {old} -> {new}")
    return sorted(found)


def micro_batches(config: TrainConfig, world_size: int) -> tuple[int, int]:
    """The number of micro-batches of a rank in a step, and the number of samples in each.

    Raises:
        ConfigError: the batch has no equal shares for that many ranks.
    """
    size = config.data.batch_size
    if size % world_size:
        raise ConfigError(
            f"configuration: expected data.batch_size to be a multiple of the {world_size} ranks, found "
            f"{size}; {-(-size // world_size) * world_size} is one"
        )
    own = size // world_size
    most = min(config.data.micro_batch or own, own)
    count = next(count for count in range(-(-own // most), own + 1) if own % count == 0)
    return count, own // count


def mesh_shape(config: TrainConfig, world_size: int, host_ranks: int) -> tuple[int, ...]:
    """The ranks' grid: one dimension, or for "hybrid" (replicas, ranks of a replica).

    Raises:
        ConfigError: the ranks do not fill such a grid.
    """
    if config.parallel.strategy != "hybrid":
        return (world_size,)
    inner = config.parallel.shard_ranks or host_ranks
    if world_size % inner:
        raise ConfigError(
            f'configuration: strategy "hybrid" with {inner} ranks in a replica (parallel.shard_ranks, or the '
            f"ranks of a host) expects a multiple of {inner} ranks, found {world_size}"
        )
    return (world_size // inner, inner)
