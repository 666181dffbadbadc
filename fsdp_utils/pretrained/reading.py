"""Read a folder of safetensors files: its tensors' places, and a part of a tensor straight into its target.

The format: eight bytes with the length of the header, the header in JSON, the tensors' bytes. The library
safetensors is not used: fsdp_utils depends on torch alone, safe_open maps the files, so that a rank's peak
grows by what it reads, and of two entries of one name it takes the last one without an error.

Source of the format: https://huggingface.co/docs/safetensors
"""

import io
import json
import math
import struct
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fsdp_utils.checkpoint.errors import CheckpointError
from fsdp_utils.checkpoint.files import is_plain_name, open_regular, read_regular, size_of
from fsdp_utils.checkpoint.reader import fill
from fsdp_utils.pretrained.export import DTYPE_NAMES, INDEX, ONE_FILE

_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}
_LENGTH = struct.Struct("<Q")
# Of a header, or an index: enough for 300,000 tensors. As Python objects it takes up to thirty times as much.
_MOST_BYTES = 1 << 25
# What reading a damaged or forged file may raise.
_MALFORMED = (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError)
# What does not lie in the file as it has to lie in memory goes through a buffer of about this size.
BUFFER_BYTES = 2**24


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
    if (folder / ONE_FILE).exists():  # as in transformers, which then ignores an index
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
        content = json.loads(read_regular(index, at_most=_MOST_BYTES), object_pairs_hook=_no_duplicates)
        weight_map = content["weight_map"]
        files = set(weight_map.values())
        if outside := [file for file in files if type(file) is not str or not is_plain_name(file)]:
            raise ValueError(f"the file {outside[0]!r:.200}, which is not in the folder")
    except _MALFORMED as error:
        raise CheckpointError(
            f"{index}: expected JSON with a file for each tensor under 'weight_map', found none: "
            f"{type(error).__name__}: {error}"
        ) from error
    headers = {file: _read_header(folder / file) for file in sorted(files)}
    for name, file in weight_map.items():
        if name not in headers[file]:
            raise CheckpointError(
                f"{folder / file}: expected {name}, which {INDEX} says is in it, found {len(headers[file])} "
                "others. The folder is of two models: download it again"
            )
    return {name: headers[file][name] for name, file in weight_map.items()}


def _read_header(path: Path) -> dict[str, Entry]:
    """The tensors in a file, by name. Their bytes fill the file without holes and without overlap.

    Raises:
        CheckpointError: it is missing, cut short, or no such file.
    """
    try:
        with open_regular(path) as file:
            size = size_of(file)
            start = file.read(_LENGTH.size)
            length = _LENGTH.unpack(start)[0] if len(start) == _LENGTH.size else size
            if length > min(size - _LENGTH.size, _MOST_BYTES):
                raise CheckpointError(
                    f"{path}: expected a safetensors file, found {size} bytes that begin with no header of "
                    "one: it was cut short, or is something else, such as a pointer to one. Download it again"
                )
            header = json.loads(file.read(length), object_pairs_hook=_no_duplicates)
        data = _LENGTH.size + length
        entries, ends = {}, [(0, 0)]
        for name, tensor in header.items():
            if name == "__metadata__":
                continue
            dtype, shape = _DTYPES.get(tensor["dtype"]), tensor["shape"]
            if dtype is None:
                raise CheckpointError(
                    f"{path}: expected {name:.200} with a dtype of {sorted(_DTYPES)}, found "
                    f"{tensor['dtype']!r:.100}. Convert the folder first"
                )
            first, last = tensor["data_offsets"]
            if not all(type(number) is int and 0 <= number < 2**63 for number in (first, last, *shape)):
                raise ValueError(f"{name:.200} at {first!r:.50} to {last!r:.50} of shape {shape!r:.100}")
            if last - first != math.prod(shape) * dtype.itemsize:
                raise ValueError(f"{last - first} bytes for {name:.200} as {tensor['dtype']} {shape!r:.100}")
            entries[name] = Entry(path, data + first, dtype, torch.Size(shape))
            ends.append((first, last))
        for (_, last), (first, _) in pairwise(sorted(ends)):
            if last != first:
                raise ValueError(f"a tensor from byte {first} on, after one that ends at {last}")
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{path}: expected a safetensors file in the folder, found none. Download it"
        ) from error
    except _MALFORMED as error:
        raise CheckpointError(
            f"{path}: expected the header of a safetensors file, found {type(error).__name__}: {error}. "
            "Download it again"
        ) from error
    end = data + max(last for _, last in ends)
    if end != size:
        raise CheckpointError(
            f"{path}: expected {end} bytes by its header, found {size}: "
            + ("it was cut short" if size < end else "more was written")
            + ". Download it again"
        )
    return entries


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """For json.loads, which keeps the last of several entries of one name."""
    found = dict(pairs)
    if len(found) < len(pairs):
        (name, _), *_ = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"{name!r:.100} twice")
    return found


def read_part(
    entry: Entry, file: io.RawIOBase, offsets: Sequence[int], sizes: Sequence[int], target: Tensor
) -> None:
    """Read a part of the tensor into target. Holds at most BUFFER_BYTES, or a row of the tensor, besides.

    Args:
        entry: the tensor.
        file: entry.path, opened without a buffer.
        offsets: of the part in the tensor, by dimension.
        sizes: its shape.
        target: has this shape; of any dtype, on any device, with any strides.

    Raises:
        CheckpointError: the file has become shorter.
    """
    if target.numel() == 0:
        return
    if not entry.shape:  # a single number: a row of one
        entry, offsets, sizes, target = entry._replace(shape=torch.Size([1])), [0], [1], target.reshape(1)
    row, columns = entry.shape[1:], list(zip(offsets[1:], sizes[1:], strict=True))
    row_bytes = math.prod(row) * entry.dtype.itemsize
    begin = entry.begin + offsets[0] * row_bytes
    full_rows = list(sizes[1:]) == list(row)
    if full_rows and target.device.type == "cpu" and target.dtype == entry.dtype and target.is_contiguous():
        fill(target, file, begin, str(entry.path))
        return
    rows = min(sizes[0], max(1, BUFFER_BYTES // row_bytes))
    buffer = torch.empty((rows, *row), dtype=entry.dtype)
    for first in range(0, sizes[0], rows):
        part = buffer[: sizes[0] - first]
        fill(part, file, begin + first * row_bytes, str(entry.path))
        for dim, (offset, size) in enumerate(columns, 1):
            part = part.narrow(dim, offset, size)
        target[first : first + rows].copy_(part)
