"""The header of one safetensors file, checked as the format's own library checks it.

Source of the format: https://huggingface.co/docs/safetensors (eight bytes with the length of the header, the
header in JSON, the tensors' bytes). The core depends on torch alone, so the library itself may not be here.
"""

import json
import math
import os
import struct
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fsdp_utils.checkpoint.errors import CheckpointError
from fsdp_utils.checkpoint.files import open_regular
from fsdp_utils.pretrained.export import DTYPE_NAMES

_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}
_LENGTH = struct.Struct("<Q")
# Enough for 300,000 tensors in one file. As Python objects it takes up to thirty times as much.
_MOST_HEADER_BYTES = 1 << 25


class Entry(NamedTuple):
    """Where a tensor is, and what it is."""

    path: Path
    begin: int  # of its bytes, in the file
    dtype: torch.dtype
    shape: torch.Size


def read_header(path: Path) -> dict[str, Entry]:
    """The tensors in a file, by name. Their bytes fill the file without holes and without overlap.

    Raises:
        CheckpointError: it is missing, cut short, or no such file.
    """
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            start = file.read(_LENGTH.size)
            length = _LENGTH.unpack(start)[0] if len(start) == _LENGTH.size else size
            if length > min(size - _LENGTH.size, _MOST_HEADER_BYTES):
                raise CheckpointError(
                    f"{path}: expected a safetensors file, found {size} bytes that begin with no header of "
                    "one: it was cut short, or is something else, such as a pointer to one. Download it again"
                )
            header = json.loads(file.read(length), object_pairs_hook=no_duplicates)
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
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
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


def no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """For json.loads, which keeps the last of several entries of one name."""
    found = dict(pairs)
    if len(found) < len(pairs):
        (name, _), *_ = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"{name!r:.100} twice")
    return found
