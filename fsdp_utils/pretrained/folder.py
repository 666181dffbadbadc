"""What is in a folder of safetensors files, and one part of one tensor, read straight to where it belongs."""

import io
import json
import math
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from fsdp_utils.checkpoint.errors import CheckpointError
from fsdp_utils.checkpoint.files import is_plain_name, read_regular
from fsdp_utils.checkpoint.reader import fill
from fsdp_utils.pretrained.header import Entry, no_duplicates, read_header

ONE_FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"

_MOST_BYTES = 1 << 25  # of an index

# What does not lie in the file as it has to lie in memory goes through a buffer of about this size.
BUFFER_BYTES = 2**24


def read_folder(folder: Path) -> dict[str, Entry]:
    """The tensors of a folder as transformers' save_pretrained writes it, by name. Reads headers alone.

    Raises:
        CheckpointError: there is no such folder, a file of it is missing or cut short, or is not one.
    """
    index = folder / INDEX
    if (folder / ONE_FILE).exists():  # as in transformers, which then does not look at an index
        return read_header(folder / ONE_FILE)
    if not index.exists():
        there = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else None
        raise CheckpointError(
            f"{folder}: expected a folder with {ONE_FILE}, or with {INDEX} and the files it names, found "
            + ("no folder" if there is None else f"{there[:8] or 'an empty one'}")
            + ". Give the folder itself, downloaded; save_pretrained() of transformers and "
            "export_safetensors() write such folders"
        )
    try:
        content = json.loads(read_regular(index, at_most=_MOST_BYTES), object_pairs_hook=no_duplicates)
        weight_map = content["weight_map"]
        files = set(weight_map.values())
        if outside := [file for file in files if type(file) is not str or not is_plain_name(file)]:
            raise ValueError(f"the file {outside[0]!r:.200}, which is not in the folder")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"{index}: expected JSON with a file for each tensor under 'weight_map', found none: "
            f"{type(error).__name__}: {error}"
        ) from error
    headers = {file: read_header(folder / file) for file in sorted(files)}
    entries = {}
    for name, file in weight_map.items():
        if name not in headers[file]:
            raise CheckpointError(
                f"{folder / file}: expected {name}, which {INDEX} says is in it, found {len(headers[file])} "
                "others. The folder is of two models: download it again"
            )
        entries[name] = headers[file][name]
    return entries


def read_part(
    entry: Entry, file: io.RawIOBase, offsets: Sequence[int], lengths: Sequence[int], target: Tensor
) -> None:
    """Read a part of the tensor into target. Holds at most BUFFER_BYTES, or a row of the tensor, besides.

    Args:
        file: entry.path, opened without a buffer.
        offsets: of the part in the tensor, by dimension.
        lengths: its shape.
        target: has this shape; of any dtype, on any device, with any strides.

    Raises:
        CheckpointError: the file has become shorter.
    """
    if target.numel() == 0:
        return
    if not entry.shape:  # a single number: a row of one
        entry, offsets, lengths, target = entry._replace(shape=torch.Size([1])), [0], [1], target.reshape(1)
    row, columns = entry.shape[1:], list(zip(offsets[1:], lengths[1:], strict=True))
    row_bytes = math.prod(row) * entry.dtype.itemsize
    begin = entry.begin + offsets[0] * row_bytes
    whole_rows = list(lengths[1:]) == list(row)
    if whole_rows and target.device.type == "cpu" and target.dtype == entry.dtype and target.is_contiguous():
        fill(target, file, begin, str(entry.path))
        return
    rows = min(lengths[0], max(1, BUFFER_BYTES // row_bytes))
    buffer = torch.empty((rows, *row), dtype=entry.dtype)
    for first in range(0, lengths[0], rows):
        part = buffer[: lengths[0] - first]
        fill(part, file, begin + first * row_bytes, str(entry.path))
        for dim, (offset, length) in enumerate(columns, 1):
            part = part.narrow(dim, offset, length)
        target[first : first + rows].copy_(part)
