"""The training data, and which samples each step trains on.

They follow from the seed and the number of samples seen before, on any number of ranks. So a run that is
resumed on more or fewer ranks continues with the sample after the last.
"""

import importlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import StackDataset, default_collate

from fsdp_utils.train.config import ConfigError, DataConfig
from fsdp_utils.train.ranks import ranks

IGNORED = -100  # a label that the loss of transformers' models leaves out
_SPREAD = 64  # samples that are looked at before a run


@dataclass(frozen=True)
class Data:
    """The samples of a run."""

    train: Any  # samples by number
    test: Any  # as train; may be empty
    predicts_next: bool  # whether the logits at a position are about the label after it (decoders)
    build: Callable[[], torch.nn.Module] | None  # the data's model, with the same weights on every rank
    identity: str  # tells these training samples from others

    def labels(self, batch: Mapping[str, Tensor]) -> int:
        """Count the labels over which a batch's loss is a mean."""
        labels = batch["labels"][:, 1:] if self.predicts_next else batch["labels"]
        return int((labels != IGNORED).sum())


def load_data(config: DataConfig) -> Data:
    """Load the data that the configuration names; ConfigError where it is not there, or not enough."""
    module, _, name = config.source.partition(":")
    try:
        function = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        found = f"found {config.source!r}: {error}"
        raise ConfigError(f'data.source: expected "module:function", {found}') from error
    task, where = function(), f"data.source {config.source!r}: expected"
    try:
        train, test = _samples(task.train), _samples(task.test)
        train[0]["labels"]
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{where} an object with .train and .test, each a dict of tensors with a row for each sample, "
            f'"labels" among them, or a dataset of such dicts; found {error!r}'
        ) from error
    predicts_next, build = getattr(task, "predicts_next", False), getattr(task, "build", None)
    if len(train) < config.batch_size:
        raise ConfigError(
            f"{where} at least data.batch_size ({config.batch_size}) samples to train on, found {len(train)}"
        )
    if predicts_next and len(train[0]["labels"]) < 2:
        raise ConfigError(f"{where} samples of at least 2 tokens, of which each predicts the next, found 1")
    return Data(train, test, predicts_next, build, _fingerprint(train))


def _samples(given: Any) -> Any:
    return StackDataset(**given) if isinstance(given, Mapping) and given else given or []


def spread(samples: Any) -> list[dict[str, Tensor]]:
    """Return some samples, evenly spread over all."""
    return [samples[row] for row in sorted({len(samples) * i // _SPREAD for i in range(_SPREAD)})]


def _fingerprint(samples: Any) -> str:
    digest = blake2b(digest_size=8)
    for sample in spread(samples):
        for tensor in sample.values():
            digest.update(tensor.cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
    return f"{len(samples):,} samples with hash {digest.hexdigest()}"


def collate(samples: Any, rows: Iterable[int]) -> dict[str, Tensor]:
    """Put the samples of these numbers into one batch."""
    return default_collate([samples[row] for row in rows])


def check_same_data(data: Data, before: str | None) -> None:
    """Raise ConfigError where the data differs between ranks, or from `before`, what the checkpoint holds."""
    ranks().same("", {"data.source": data.identity})
    if before not in (None, data.identity):
        raise ConfigError(
            f"data.source: expected {before}, as the checkpoint has it, found {data.identity}. Restore them; "
            "to train on other data, begin a run with another --out."
        )


def rows_at(position: int, count: int, total: int, seed: int) -> Tensor:
    """Return the numbers of the next samples: i64[count]. Each epoch has all of them in a new order.

    Args:
        position: how many samples were seen before, by all ranks together.
        count: how many are wanted; they may lie in two epochs.
        total: how many samples there are.
    """
    taken: list[Tensor] = []
    while count:
        epoch, start = divmod(position, total)
        taken.append(_order(total, seed, epoch)[start : start + count])
        position += len(taken[-1])
        count -= len(taken[-1])
    return torch.cat(taken)


@lru_cache(maxsize=2)
def _order(total: int, seed: int, epoch: int) -> Tensor:
    generator = torch.Generator().manual_seed((seed * 1_000_003 + epoch) % 2**63)
    return torch.randperm(total, generator=generator)
