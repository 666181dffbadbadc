"""export_safetensors: write a checkpoint as the folder that transformers' from_pretrained reads.

Source of the format: checkpoint/tensor_files.py.
"""

import json
import os
import re
from itertools import chain
from pathlib import Path
from typing import Any

from fsdp_utils.checkpoint.errors import CheckpointError
from fsdp_utils.checkpoint.files import doing, local_path, sync_directory, write_file
from fsdp_utils.checkpoint.folder import Unfinished, find, read_manifest, verify_checkpoint
from fsdp_utils.checkpoint.state import MODEL
from fsdp_utils.checkpoint.tensor_files import StoredTensors, open_tensors, pack_header
from fsdp_utils.pretrained.loading import INDEX, ONE_FILE
from fsdp_utils.sharding.local_part import view

ADAPTER_FILE, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"
_PEFT = "base_model.model."  # the beginning of every name in a peft model, and in peft's files
_OTHER_BASE = ("pissa", "olora", "corda", "lora_ga", "loftq")  # these initialisations change the base weights
Keys = dict[str, str]  # keys in the checkpoint, by the name under which to write them


def export_safetensors(
    checkpoint: str | os.PathLike[str],
    out_dir: str | os.PathLike[str],
    *,
    prefix: str = "",
    adapter_only: bool = False,
) -> Path:
    """Write the model of a checkpoint as safetensors, in one process that holds one tensor at a time.

    The folder gets model.safetensors, and the config.json of a transformers model. Add the tokenizer with
    `tokenizer.save_pretrained(out_dir)`. Tied tensors are written once; transformers ties them again. The
    checkpoint is verified first. After a crash a reader finds the old model, the new one, or none.

    Args:
        checkpoint: of save_distributed, or a directory of such checkpoints (then the last one is taken).
        out_dir: made if it is not there. What has the same name is replaced, and an earlier export no longer
            found: an index beside the new weights is deleted.
        prefix: of the names to export, and left out of them: "net." where a LightningModule has the
            transformers model as `self.net`. The config.json is that model's.
        adapter_only: of a model with LoRA by peft, write what peft's `PeftModel.from_pretrained` reads:
            adapter_model.safetensors and adapter_config.json. Without it such a model is refused; peft's
            merge_and_unload() makes a model without adapters.

    Returns:
        out_dir.

    Raises:
        CheckpointError: the checkpoint is not what was saved, or holds what safetensors cannot represent; or
            out_dir is a URL, begins with ~, or cannot be written.

    Example::

        folder = export_safetensors("run", "exported")
        print(*(file.name for file in folder.iterdir()))  # model.safetensors
    """
    source, out = find(checkpoint), local_path(out_dir)
    verify_checkpoint(source)
    manifest = read_manifest(source)
    stored = open_tensors(source, manifest)
    keys, config, adapters = _model_in(source, manifest, stored, prefix)
    if adapter_only:
        keys, config = _adapter_in(source, keys, adapters)
    elif adapters:
        raise CheckpointError(
            f"{source}: expected a model without adapters, found {', '.join(adapters)}. adapter_only=True "
            "exports a LoRA adapter; to merge it, PeftModel.from_pretrained(base, folder).merge_and_unload()"
        )
    else:
        names = dict(zip(reversed(keys.values()), reversed(keys), strict=True))  # the first one of tied names
        keys = {name: key for name, key in keys.items() if names[key] == name}
    tensors = {name: stored.specs[key] for name, key in keys.items()}
    content = (view(stored.read_whole(key)) for key in keys.values())
    weights, config_name = (ADAPTER_FILE, ADAPTER_CONFIG) if adapter_only else (ONE_FILE, "config.json")
    with Unfinished(out, manifest["step"]) as folder:  # as a save: what a crash left is deleted
        unfinished, _ = folder.begin()
        write_file(unfinished / weights, chain([pack_header(tensors, {})], content))
        if config is not None:
            write_file(unfinished / config_name, [json.dumps(config, indent=2).encode()])
        with doing("write", out):
            for read_first in (weights,) if adapter_only else (weights, INDEX):
                (out / read_first).unlink(missing_ok=True)  # so there is none while others change
            sync_directory(out)
            for name in (config_name, weights) if config is not None else (weights,):
                (unfinished / name).replace(out / name)
            sync_directory(out)
    return out


def _model_in(
    source: Path, manifest: dict[str, Any], stored: StoredTensors, prefix: str
) -> tuple[Keys, dict[str, Any] | None, dict[str, Any]]:
    """Return the tensors of the model under all their names, its configuration, and those of its adapters."""
    names = {key.removeprefix(MODEL): key for key in stored.specs if key.startswith(MODEL)}
    names |= {alias: names[first] for alias, first in manifest["tied"].items()}
    keys = {name.removeprefix(prefix): key for name, key in names.items() if name.startswith(prefix)}
    if not keys:
        heads = sorted({name.partition(".")[0] + "." for name in names})
        raise CheckpointError(
            f"{source}: expected a model with names that begin with {prefix!r}, found {heads[:5]}"
        )
    about = manifest.get("parts", {}).get(prefix.removesuffix("."), {}) if prefix else manifest
    return keys, about.get("config"), about.get("adapters", {})


def _adapter_in(source: Path, keys: Keys, adapters: dict[str, Any]) -> tuple[Keys, dict[str, Any]]:
    """Return the tensors of the one LoRA adapter, under the names that peft reads, and its configuration."""
    kinds = {name: str(config.get("peft_type")) for name, config in adapters.items()}
    if list(kinds.values()) != ["LORA"]:
        raise CheckpointError(
            f"{source}: expected a model with one LoRA adapter by peft, found {kinds or 'no adapter'}"
        )
    ((adapter, config),) = adapters.items()
    start, bias = str(config.get("init_lora_weights")).lower(), config.get("bias", "none")
    if start.startswith(_OTHER_BASE) or bias != "none" or config.get("trainable_token_indices"):
        raise CheckpointError(
            f"{source}: expected an adapter of LoRA matrices and modules_to_save for the original weights, "
            f"found init_lora_weights={start!r}, bias={bias!r}, trainable_token_indices="
            f"{config.get('trainable_token_indices')!r}. Load the checkpoint into the model, and call peft's "
            "merge_and_unload()"
        )
    found = {}
    for name, key in keys.items():
        head, own, tail = name.partition(f".modules_to_save.{adapter}.")
        if own:
            found[f"{head}.{tail}"] = key
        elif re.search(r"\.lora_\w+\.", name):
            new = re.sub(rf"(\.lora_\w+)\.{re.escape(adapter)}(?=\.|$)", r"\1", name)
            found[re.sub(r"(\.lora_magnitude_vector)\.weight$", r"\1", new)] = key  # DoRA's
    return {_PEFT + name.removeprefix(_PEFT): key for name, key in found.items()}, config
