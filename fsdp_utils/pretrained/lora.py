"""LoRA adapters of peft in a checkpoint: merged into the weights, or alone under peft's names."""

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fsdp_utils.checkpoint.errors import CheckpointError

_PREFIX = "base_model.model."  # of every name in a peft model, and in peft's files
_ROWS = 1024  # of a product of A and B that is in memory at once
# Settings of a LoraConfig with which the adapter is more, or other, than B A added to the weight.
_NOT_ADDED = (
    "use_dora",
    "trainable_token_indices",
    "alora_invocation_tokens",
    "use_bdlora",
    "arrow_config",
    "kasa_config",
    "monteclora_config",
)
_OTHER_BASE = ("pissa", "olora", "corda", "lora_ga", "loftq")  # these initialisations change the base weights


class SavedModel(NamedTuple):
    """The model in a checkpoint."""

    specs: dict[str, tuple[torch.dtype, torch.Size]]  # by name, without tied ones
    read: Callable[[str], Tensor]  # one full tensor, in CPU memory of its own
    tied: dict[str, str]  # further name of a tensor -> its name in specs
    config: dict[str, Any] | None  # of a transformers model
    adapters: dict[str, dict[str, Any]]  # peft's configuration of each adapter, by its name


def only_lora(source: SavedModel) -> tuple[str, dict[str, Any]]:
    """Name and configuration of the one LoRA adapter.

    Raises:
        CheckpointError: there is none, several, or another kind of adapter.
    """
    kinds = {name: str(config.get("peft_type")) for name, config in source.adapters.items()}
    if list(kinds.values()) != ["LORA"]:
        raise CheckpointError(
            f"expected the checkpoint of a model with one LoRA adapter by peft, found "
            f"{kinds or 'no adapter in its description, which plain DCP and fsdp_utils 0.1.0 do not write'}"
        )
    return next(iter(source.adapters.items()))


def adapter_of(source: SavedModel) -> SavedModel:
    """The adapter alone, under the names that peft reads: without the adapter's own."""
    adapter, config = only_lora(source)
    start = str(config.get("init_lora_weights")).lower()
    if start.startswith(_OTHER_BASE):
        raise CheckpointError(
            f"expected an adapter of the original weights, found init_lora_weights={start!r}, which changes "
            "them: export the merged model"
        )
    if config.get("bias", "none") != "none" or config.get("trainable_token_indices"):
        raise CheckpointError(
            f"expected an adapter of LoRA matrices and modules_to_save, found bias={config.get('bias')!r}, "
            f"trainable_token_indices={config.get('trainable_token_indices')!r}: export the merged model"
        )
    found, stored = {}, _with_tied(source)
    for name in stored:
        head, own, tail = name.partition(f".modules_to_save.{adapter}.")
        if own:
            found[f"{head}.{tail}"] = name
        elif re.search(r"\.lora_\w+\.", name):
            new = re.sub(rf"(\.lora_\w+)\.{re.escape(adapter)}(?=\.|$)", r"\1", name)
            found[re.sub(r"(\.lora_magnitude_vector)\.weight$", r"\1", new)] = name  # DoRA's
    found = {new if new.startswith(_PREFIX) else _PREFIX + new: name for new, name in found.items()}
    return source._replace(
        specs={new: source.specs[stored[name]] for new, name in found.items()},
        read=lambda new: source.read(stored[found[new]]),
        tied={},
    )


def _with_tied(source: SavedModel) -> dict[str, str]:
    """All names of the model's tensors -> their names in specs."""
    return {**{name: name for name in source.specs}, **source.tied}


def merged(source: SavedModel) -> SavedModel:
    """The model with its adapter added to the weights, one tensor at a time.

    Where an adapter changes only one of two tied weights, as one on an embedding does, they are two weights
    in the merged model, and its configuration says so. (peft's merge_and_unload changes both.)

    Raises:
        CheckpointError: an adapter that is not merely added to a matrix, such as DoRA's.
    """
    adapter, config = only_lora(source)
    if other := [key for key in _NOT_ADDED if config.get(key)]:
        raise CheckpointError(
            f"expected a LoRA adapter that is added to the weights, found one with {other[0]}. "
            "Merge with peft where it can: PeftModel.from_pretrained(...).merge_and_unload()"
        )
    stored = _with_tied(source)
    pairs: dict[str, list[str]] = {}  # a weight -> the names of its two matrices
    found: dict[str, str] = {}  # name in the merged model -> name here
    for name in stored:
        head, lora, _ = name.partition(".lora_")
        if lora:
            pairs.setdefault(f"{head}.base_layer.weight", []).append(name)
        elif f".modules_to_save.{adapter}." in name:
            found[name.replace(f".modules_to_save.{adapter}.", ".")] = name
        elif ".original_module." not in name:
            found[name.replace(".base_layer.", ".")] = name
    found = {new.removeprefix(_PREFIX): name for new, name in found.items()}
    full = source._replace(
        specs={name: source.specs[first] for name, first in stored.items()},
        read=lambda name: source.read(stored[name]),
    )
    adders = {target: _adder(full, config, target, sorted(pair)) for target, pair in pairs.items()}
    kept = set(found.values())
    further = {name: source.tied[name] for name in kept & source.tied.keys()}
    settings = source.config
    if all(first in kept and not {name, first} & adders.keys() for name, first in further.items()):
        found = {new: name for new, name in found.items() if name not in further}
    elif settings is not None:
        settings = {**settings, "tie_word_embeddings": False}

    def read(new: str) -> Tensor:
        weight = full.read(found[new])
        if add := adders.get(found[new]):
            add(weight)
        return weight

    specs = {new: full.specs[name] for new, name in found.items()}
    return source._replace(specs=specs, read=read, config=settings, tied={})


def _adder(
    source: SavedModel, config: dict[str, Any], target: str, pair: list[str]
) -> Callable[[Tensor], None]:
    """What adds B A, scaled, to the weight, a block of rows at a time."""
    kinds = [re.sub(r"^.*\.(lora_(?:embedding_)?[AB])\.[^.]+(\.weight)?$", r"\1", name) for name in pair]
    embedding = kinds == ["lora_embedding_A", "lora_embedding_B"]
    shapes = [list(source.specs[name][1]) for name in (*pair, target) if name in source.specs]
    flip = embedding or bool(config.get("fan_in_fan_out"))
    fits = (embedding or kinds == ["lora_A", "lora_B"]) and len(shapes) == 3 and all(map(len, shapes))
    if fits:
        (rank, columns), (rows, inner), weight = shapes
        fits = rank == inner and weight == ([columns, rows] if flip else [rows, columns])
    if not fits:
        raise CheckpointError(
            f"{target}: expected two matrices of LoRA and the weight that they are added to, found "
            f"{ {name: list(source.specs[name][1]) for name in (*pair, target) if name in source.specs} }. "
            "Merge with peft: PeftModel.from_pretrained(...).merge_and_unload()"
        )
    module = target.removeprefix(_PREFIX).removesuffix(".base_layer.weight")
    alpha = config["lora_alpha"]
    for key, value in (config.get("alpha_pattern") or {}).items():
        if re.match(rf"(.*\.)?({key})$", module):
            alpha = value
            break
    rank = source.specs[pair[0]][1][0]
    scale = alpha / (rank**0.5 if config.get("use_rslora") else rank)

    def add(weight: Tensor) -> None:
        a, b = (source.read(name) for name in pair)
        out = weight.T if flip else weight
        in_half = b.dtype.itemsize < 4  # peft multiplies these in float32
        for start in range(0, len(b), _ROWS):
            rows = b[start : start + _ROWS]
            product = rows.float() @ a.float() if in_half else rows @ a
            out[start : start + _ROWS] += (product * scale).to(b.dtype)

    return add
