"""export_safetensors: write a checkpoint as the folder that transformers' from_pretrained reads.

Source of the format: https://huggingface.co/docs/safetensors (eight bytes with the length of the header, the
header in JSON, the tensors' bytes), and of the index: transformers' sharded checkpoints.
"""

import json
import os
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fsdp_utils.checkpoint.errors import CheckpointError
from fsdp_utils.checkpoint.files import readable, replacing
from fsdp_utils.checkpoint.full import read_full
from fsdp_utils.checkpoint.manifest import MANIFEST, Progress, read_manifest, tensor_specs
from fsdp_utils.checkpoint.metadata import read_any_metadata, read_described, specs
from fsdp_utils.checkpoint.reader import read_tensor
from fsdp_utils.checkpoint.remote import located
from fsdp_utils.checkpoint.state import MODEL
from fsdp_utils.checkpoint.user_state import view
from fsdp_utils.checkpoint.verify import newest, verify_checkpoint
from fsdp_utils.pretrained.lora import SavedModel, adapter_of, merged, only_lora

ONE_FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"
ADAPTER_FILE, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"
DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def export_safetensors(
    checkpoint: str | os.PathLike[str],
    out_dir: str | os.PathLike[str],
    *,
    shard_gib: float = 4.0,
    adapter_only: bool = False,
    verify: bool = True,
    progress: Progress = lambda count: None,
) -> Path:
    """Write the model of a checkpoint as safetensors, in one process that holds one tensor at a time.

    The folder gets model.safetensors, or several numbered ones and model.safetensors.index.json. The
    config.json of a transformers model is written too: it was saved with the checkpoint. Add the tokenizer
    with `tokenizer.save_pretrained(out_dir)`. Tied tensors are written once; transformers ties them again.

    A checkpoint of a model with LoRA by peft gives the merged model, which needs no peft: each weight plus
    its adapter. With adapter_only it gives the folder that peft's `PeftModel.from_pretrained` reads.

    Args:
        checkpoint: a file of save_full, a checkpoint of save_distributed or a directory of them (then the
            last one is taken), or a checkpoint of plain DCP that has its model under "model" (not verified).
        out_dir: made if it is not there. What has the same name is replaced, and an earlier export no longer
            found: a model.safetensors or an index beside the new weights is deleted.
        shard_gib: begin another file where one would become larger than this.
        adapter_only: write adapter_model.safetensors and adapter_config.json, and nothing else.
        verify: False does not check the checkpoint's hashes.
        progress: told of each piece of work, in bytes of tensors written.

    Returns:
        out_dir.

    Raises:
        CheckpointError: the checkpoint is not what was saved, or holds what safetensors cannot represent.

    Example::

        folder = export_safetensors("run", "exported", shard_gib=5)
        print(*(file.name for file in folder.iterdir()))  # model.safetensors
    """
    if not 0 < shard_gib < float("inf"):
        raise CheckpointError(f"expected shard_gib to be above 0, and finite, found {shard_gib}")
    checkpoint = located(checkpoint)
    with readable(checkpoint):
        source = open_model(newest(checkpoint), verify=verify, adapter_only=adapter_only)
    out = Path(out_dir)
    out.mkdir(parents=True, exist_ok=True)
    if adapter_only:
        _write(out / ADAPTER_FILE, list(source.specs), source, progress)
        _replace(out / ADAPTER_CONFIG, json.dumps(only_lora(source)[1], indent=2).encode())
        return out
    shards = list(_shards(source.specs, int(shard_gib * 2**30)))
    weight_map = {}
    one_file, index_file = out / ONE_FILE, out / INDEX
    if len(shards) > 1:  # an index of an earlier export must not lead to a mixture of both
        index_file.unlink(missing_ok=True)
    for number, names in enumerate(shards, 1):
        file = ONE_FILE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        _write(out / file, names, source, progress)
        weight_map |= dict.fromkeys(names, file)
    if len(shards) == 1:
        index_file.unlink(missing_ok=True)
    else:
        one_file.unlink(missing_ok=True)  # an earlier one, which transformers would read instead
        total = sum(_bytes(source.specs[name]) for name in weight_map)
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        _replace(out / INDEX, json.dumps(index, indent=2).encode())
    if source.config is not None:
        _replace(out / "config.json", json.dumps(source.config, indent=2).encode())
    return out


def open_model(checkpoint: Path, *, verify: bool, adapter_only: bool = False) -> SavedModel:
    """The model in a checkpoint of any kind: with its LoRA adapter merged, or the adapter alone."""
    source = _open(checkpoint, verify=verify)
    try:
        if adapter_only:
            return adapter_of(source)
        return merged(source) if source.adapters else source
    except (AttributeError, TypeError, ValueError, LookupError, ArithmeticError, re.error) as error:
        raise CheckpointError(
            f"{checkpoint}: expected the configuration of an adapter as peft writes it, found another one "
            f"({type(error).__name__}: {error!s:.200}): the checkpoint is damaged or forged"
        ) from error


def _open(checkpoint: Path, *, verify: bool) -> SavedModel:
    if checkpoint.is_dir() and not (checkpoint / MANIFEST).exists():  # of plain DCP
        metadata = read_any_metadata(checkpoint)
        return SavedModel(
            _model_specs(specs(metadata), tied={}),
            lambda name: read_tensor(checkpoint, metadata, MODEL + name),
            {},
            None,
            {},
        )
    if verify:
        verify_checkpoint(checkpoint)
    if checkpoint.is_dir():
        manifest = read_manifest(checkpoint)
        metadata = read_described(checkpoint, manifest)
        return SavedModel(
            _model_specs(tensor_specs(manifest), manifest["tied"]),
            lambda name: read_tensor(checkpoint, metadata, MODEL + name),
            manifest["tied"],
            manifest["config"],
            manifest.get("adapters", {}),
        )
    content = read_full(checkpoint)
    model: dict[str, Any] = content["model"]
    tensors = {MODEL + name: (t.dtype, t.shape) for name, t in model.items() if isinstance(t, Tensor)}
    return SavedModel(
        _model_specs(tensors, content["tied"]),
        lambda name: model[name].clone(memory_format=torch.contiguous_format),
        content["tied"],
        content["about"]["config"],
        content["about"].get("adapters", {}),
    )


def _model_specs(
    found: dict[str, tuple[torch.dtype, torch.Size]], tied: dict[str, str]
) -> dict[str, tuple[torch.dtype, torch.Size]]:
    model = {key.removeprefix(MODEL): spec for key, spec in found.items() if key.startswith(MODEL)}
    if not model:
        raise CheckpointError(f"expected tensors under {MODEL!r}, found only {sorted(found)[:5]}")
    if "__metadata__" in model:
        raise CheckpointError("found a tensor '__metadata__', a name that safetensors keeps for itself")
    unknown = {name: dtype for name, (dtype, _) in model.items() if dtype not in DTYPE_NAMES}
    if unknown:
        raise CheckpointError(f"expected dtypes that safetensors has, found {unknown}")
    return {name: spec for name, spec in model.items() if name not in tied}


def _shards(found: dict[str, tuple[torch.dtype, torch.Size]], limit: int) -> Iterator[list[str]]:
    names: list[str] = []
    filled = 0
    for name, spec in found.items():
        if names and filled + _bytes(spec) > limit:
            yield names
            names, filled = [], 0
        names.append(name)
        filled += _bytes(spec)
    yield names


def _write(path: Path, names: list[str], source: SavedModel, progress: Progress) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name in names:
        dtype, shape = source.specs[name]
        end = offset + _bytes(source.specs[name])
        header[name] = {"dtype": DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # the tensors begin at a multiple of eight
    with replacing(path) as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name in names:
            tensor = source.read(name)
            file.write(view(tensor))
            progress(tensor.nbytes)


def _replace(path: Path, content: bytes) -> None:
    with replacing(path) as file:
        file.write(content)


def _bytes(spec: tuple[torch.dtype, torch.Size]) -> int:
    dtype, shape = spec
    return shape.numel() * dtype.itemsize
