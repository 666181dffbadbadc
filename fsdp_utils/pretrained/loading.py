"""load_pretrained: read a folder of safetensors straight into the shards of a model.

Why not torch.distributed.checkpoint's HuggingFaceStorageReader, which reads such folders too: it maps files,
so that a rank's peak grows by two to three times its shard (measured with torch 2.13), it converts dtypes
without a warning, ignores what the model does not want, and torch 2.6 does not have it.
"""

import os
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fsdp_utils.checkpoint.collective import collective_call, outline
from fsdp_utils.checkpoint.errors import CheckpointDamagedError, CheckpointError
from fsdp_utils.checkpoint.files import local_path, read_json
from fsdp_utils.checkpoint.restore import match_model
from fsdp_utils.checkpoint.state import Held, has_fsdp1
from fsdp_utils.checkpoint.tensor_files import StoredTensors, held_part
from fsdp_utils.distributed.agreement import WAIT_S
from fsdp_utils.pretrained.meta_init import Buffer, compute_buffers, device_of, materialise
from fsdp_utils.sharding.local_part import local

ONE_FILE, INDEX = "model.safetensors", "model.safetensors.index.json"


def load_pretrained(
    folder: str | os.PathLike[str],
    model: nn.Module,
    *,
    cast: bool = False,
    device: torch.device | str | None = None,
) -> None:
    """Load a folder of safetensors into a model that may be sharded, and may still be on the meta device.

    Call it on every rank. Each reads its own part of each tensor, straight into its shard; in addition it
    holds at most 16 MiB, or one row of a tensor. So build the model under `torch.device("meta")`, wrap it
    with fully_shard, and call this instead of to_empty. All checks come before the model is changed.

    The format has no hashes: a file that was cut short is noticed, a changed byte is not.

    Args:
        folder: with model.safetensors, or with model.safetensors.index.json and the files that it names, as
            save_pretrained of transformers writes it. Each rank has to see the same one.
        model: wrapped with FSDP2 or DDP, or not at all. Its names have to be those of the files: nothing is
            renamed or joined, as from_pretrained does for some (save_pretrained's save_original_format=False
            writes what the model has). Buffers that are not saved with the model (rotary frequencies) are
            computed anew if they are on meta: by `_init_weights` of a transformers model, else by
            reset_parameters() of their module. Otherwise they stay as they are; a warning names those for
            which that computation gives other values, as to_empty leaves them uninitialised.
        cast: convert to the model's dtypes where they differ from the files'.
        device: where to put what is on meta. None is the device of the model's mesh; "cpu" is needed for
            CPUOffloadPolicy on GPUs.

    Raises:
        CheckpointError: the same on every rank. The model is as it was, unless it says otherwise.

    Example::

        with torch.device("meta"):
            model = Transformer()
        shard(model)
        load_pretrained("exported", model)
    """
    opened: list[tuple[StoredTensors, torch.device]] = []

    def facts() -> dict[str, Any]:
        if has_fsdp1(model):
            raise CheckpointError(
                "expected a model in FSDP2 (fully_shard), in DDP or in no wrapper, found one in FSDP1. Load "
                "before wrapping, or use fully_shard"
            )
        place = device_of(model) if device is None else torch.device(device)
        torch.empty(1, device=place)  # an error here, where the device cannot be used
        stored = open_folder(local_path(folder))
        opened.append((stored, place))
        return {"content of the folder": outline(stored.specs.items()), "cast": cast}

    with collective_call("load_pretrained", model, [], facts, wait_s=WAIT_S) as ranks:
        ((stored, place),) = opened

        def check() -> tuple[dict[str, list[str]], list[Buffer], list[str]]:
            held = Held(model)
            own = held.of_model()
            for name, tensor in own.items():
                held_part(name, tensor)
            remedy = "build the model that was saved there"
            names, *_ = match_model(held, stored.specs, str(folder), remedy, cast=cast)
            _check_ties(stored, own, names, place)
            return names, *compute_buffers(model, place)

        names, computed, odd = ranks.each(check)
        if odd:
            warnings.warn(
                f"load_pretrained: {', '.join(odd[:3])}: expected the values that the module computes, "
                f"found others in {len(odd)} buffers, which the folder does not hold. to_empty() leaves them "
                "uninitialised: call load_pretrained in its place, with the model still on meta. If the "
                "program has changed them, there is nothing to do.",
                stacklevel=2,
            )

        def fill() -> None:
            materialise(model, place, computed)
            own = Held(model).of_model()
            stored.read_into([(first, own[name]) for name, (first, *_) in names.items()])

        ranks.consequence = "\nThe model may be partly loaded: do not go on with it."
        ranks.each(fill)


@torch.no_grad()
def _check_ties(
    stored: StoredTensors, own: dict[str, Tensor], names: dict[str, list[str]], device: torch.device
) -> None:
    """Compare this rank's part of what is in the files under several names, one tensor at a time."""
    for key, (first, *others) in names.items():
        for name in others:
            pair = [torch.empty_like(own[key], device=device) for _ in range(2)]
            stored.read_into(zip((first, name), pair, strict=True))
            if not torch.equal(local(pair[0]), local(pair[1])):
                raise CheckpointError(
                    f"{stored.chunks[name][0].path}: expected {name} to equal {first} (they are tied in the "
                    "model), found another tensor. Build the model without tying them"
                )


def open_folder(folder: Path) -> StoredTensors:
    """Read the headers of a folder's files."""
    if (folder / ONE_FILE).exists():  # transformers, too, ignores an index then
        return StoredTensors([folder / ONE_FILE])
    if not (folder / INDEX).exists():
        there = sorted(path.name for path in folder.iterdir())[:8] if folder.is_dir() else "no folder"
        raise CheckpointError(
            f"{folder}: expected a folder with {ONE_FILE}, or with {INDEX} and the files it names, found "
            f"{there or 'an empty one'}. Give the folder itself, downloaded; save_pretrained() "
            "of transformers and export_safetensors() write such folders"
        )
    try:
        files = set(read_json(folder / INDEX)["weight_map"].values())
        if elsewhere := [name for name in files if not name or Path(name).name != name or "\0" in name]:
            raise ValueError(f"{elsewhere[0]!r}, which is not in the folder")
    except (TypeError, KeyError, ValueError, AttributeError) as error:
        raise CheckpointDamagedError(
            f"{folder / INDEX}: expected the files by tensor under 'weight_map', found {error!r:.100}"
        ) from error
    return StoredTensors([folder / file for file in sorted(files)])
