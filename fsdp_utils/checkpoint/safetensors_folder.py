"""What is in a folder of safetensors files, and one part of one tensor, read straight to where it belongs.

Source of the format: https://huggingface.co/docs/safetensors (eight bytes with the length of the header, the
header in JSON, the tensors' bytes).
"""

import io
import json
import math
import os
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fsdp_utils.checkpoint.errors import CheckpointError
from fsdp_utils.checkpoint.items import fill
from fsdp_utils.checkpoint.safetensors import DTYPE_NAMES

ONE_FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"

# What does not lie in the file as it has to lie in memory goes through a buffer of about this size.
BUFFER_BYTES = 2**24

_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}
_LENGTH = struct.Struct("<Q")
_MOST_HEADER_BYTES = 10**8  # the limit of the format's own library


class Entry(NamedTuple):
    """Where a tensor is, and what it is."""

    path: Path
    begin: int  # of its bytes, in the file
    dtype: torch.dtype
    shape: torch.Size


def read_folder(folder: Path) -> dict[str, Entry]:
    """The tensors of a folder as transformers' save_pretrained writes it, by name. Reads headers alone.

    Raises:
        CheckpointError: there is no such folder, a file of it is missing or cut short, or is not one.
    """
    index = folder / INDEX
    if (folder / ONE_FILE).exists():  # as in transformers, which then does not look at an index
        return _read_header(folder / ONE_FILE)
    if not index.exists():
        there = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else None
        raise CheckpointError(
            f"{folder}: expected a folder with {ONE_FILE}, or with {INDEX} and the files it names, found "
            + ("no folder" if there is None else f"{there[:8] or 'an empty one'}")
            + ". Give the folder itself, downloaded; save_pretrained() of transformers and "
            "export_safetensors() write such folders"
        )
    try:
        weight_map = json.loads(index.read_bytes())["weight_map"]
        files = {str(file) for file in weight_map.values()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{index}: expected JSON with a file for each tensor under 'weight_map', found none: "
            f"{type(error).__name__}: {error}"
        ) from error
    headers = {file: _read_header(folder / file) for file in sorted(files)}
    entries = {}
    for name, file in weight_map.items():
        if name not in headers[file]:
            raise CheckpointError(
                f"{folder / file}: expected {name}, which {INDEX} says is in it, found {len(headers[file])} "
                "others. The folder is of two models: download it again"
            )
        entries[name] = headers[file][name]
    return entries


def _read_header(path: Path) -> dict[str, Entry]:
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            start = file.read(_LENGTH.size)
            length = _LENGTH.unpack(start)[0] if len(start) == _LENGTH.size else size
            if length > min(size - _LENGTH.size, _MOST_HEADER_BYTES):
                raise CheckpointError(
                    f"{path}: expected a safetensors file, found {size} bytes that begin with no header of "
                    "one: it was cut short, or is something else, such as a pointer to one. Download it again"
                )
            header: dict[str, Any] = json.loads(file.read(length))
        header.pop("__metadata__", None)
        data = _LENGTH.size + length
        entries, end = {}, 0
        for name, tensor in header.items():
            first, last = tensor["data_offsets"]
            dtype, shape = _DTYPES.get(tensor["dtype"]), torch.Size(tensor["shape"])
            if dtype is None:
                raise CheckpointError(
                    f"{path}: expected {name} with a dtype of {sorted(_DTYPES)}, found {tensor['dtype']!r}. "
                    "Convert the folder first"
                )
            if first < 0 or last - first != shape.numel() * dtype.itemsize:
                raise ValueError(f"{last - first} bytes for {name} as {tensor['dtype']} {list(shape)}")
            entries[name], end = Entry(path, data + first, dtype, shape), max(end, last)
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{path}: expected a safetensors file that {INDEX} names, found none. Download it"
        ) from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{path}: expected the header of a safetensors file, found {type(error).__name__}: {error}. "
            "Download it again"
        ) from error
    if data + end != size:
        raise CheckpointError(
            f"{path}: expected {data + end} bytes by its header, found {size}: "
            + ("it was cut short" if size < data + end else "more was written")
            + ". Download it again"
        )
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
