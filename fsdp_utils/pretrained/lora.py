"""LoRA adapters of peft in a checkpoint: merged into the weights, or alone under peft's names."""

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fsdp_utils.checkpoint.errors import CheckpointError

_PREFIX = "base_model.model."  # of every name in a peft model, and in peft's files
_ROWS = 1024  # of a product of A and B that is in memory at once
_OTHER_BASE = ("pissa", "olora", "corda", "lora_ga")  # these initialisations change the base weights


class SavedModel(NamedTuple):
    """The model in a checkpoint."""

    specs: dict[str, tuple[torch.dtype, torch.Size]]  # by name, without tied ones
    read: Callable[[str], Tensor]  # one full tensor, in CPU memory of its own
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
    found = {}
    for name in source.specs:
        head, own, tail = name.partition(f".modules_to_save.{adapter}.")
        if own:
            found[f"{head}.{tail}"] = name
        elif re.search(r"\.lora_\w+\.", name):
            new = re.sub(rf"(\.lora_\w+)\.{re.escape(adapter)}(?=\.|$)", r"\1", name)
            found[re.sub(r"(\.lora_magnitude_vector)\.weight$", r"\1", new)] = name  # DoRA's
    found = {new if new.startswith(_PREFIX) else _PREFIX + new: name for new, name in found.items()}
    return source._replace(
        specs={new: source.specs[name] for new, name in found.items()},
        read=lambda new: source.read(found[new]),
    )


def merged(source: SavedModel) -> SavedModel:
    """The model that peft's merge_and_unload gives, one tensor at a time.

    Raises:
        CheckpointError: an adapter that is not merely added to a matrix, such as DoRA's.
    """
    adapter, config = only_lora(source)
    if config.get("use_dora") or config.get("trainable_token_indices"):
        raise CheckpointError(
            "expected a LoRA adapter that is added to the weights, found DoRA or trainable_token_indices. "
            "Merge with peft: PeftModel.from_pretrained(...).merge_and_unload()"
        )
    parts: dict[str, str] = {}  # name of a matrix of the adapter -> the weight that it belongs to
    found: dict[str, str] = {}  # name in the merged model -> name here
    for name in source.specs:
        head, lora, _ = name.partition(".lora_")
        if lora:
            parts[name] = f"{head}.base_layer.weight"
        elif f".modules_to_save.{adapter}." in name:
            found[name.replace(f".modules_to_save.{adapter}.", ".")] = name
        elif ".original_module." not in name:
            found[name.replace(".base_layer.", ".")] = name
    pairs: dict[str, list[str]] = {}
    for name in sorted(parts):  # A before B
        pairs.setdefault(parts[name], []).append(name)
    adders = {target: _adder(source, config, target, pair) for target, pair in pairs.items()}
    found = {new.removeprefix(_PREFIX): name for new, name in found.items()}

    def read(new: str) -> Tensor:
        weight = source.read(found[new])
        if add := adders.get(found[new]):
            add(weight)
        return weight

    return source._replace(specs={new: source.specs[name] for new, name in found.items()}, read=read)


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
