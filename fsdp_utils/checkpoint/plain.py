"""Plain data: what is not a tensor of the model or the optimizer. It is read without running code."""

import ctypes
import hashlib
import io
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from fsdp_utils.checkpoint.archive import check_archive
from fsdp_utils.checkpoint.errors import CheckpointError


class PerRank(list[Any]):
    """A value that differed between the ranks, by the rank that saved it; given where the number of ranks is
    another one now, so that the program can decide what its ranks make of it."""


def pack(value: Any, what: str) -> bytes:
    """Plain data as bytes; refuses what could not be read back without running code."""
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
        unpack(buffer.getvalue())
    except Exception as error:
        raise CheckpointError(
            f"{what}: expected tensors, numbers, strings, None, and lists, tuples, sets and dicts of them, "
            "found "
            f"{_culprit(value)}, which cannot be read back safely ({reason(error)}). For NumPy: "
            "torch.from_numpy(array) or .tolist()"
        ) from error
    return buffer.getvalue()


def view(tensor: Tensor) -> memoryview:
    """The bytes of a tensor that is contiguous and in CPU memory. Valid as long as the tensor is there."""
    assert tensor.device.type == "cpu"
    assert tensor.is_contiguous()
    if tensor.nbytes == 0:
        return memoryview(b"")
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


def unpack(data: bytes) -> Any:
    """The plain data in those bytes, and never anything that runs."""
    check_archive(io.BytesIO(data))
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)


def reason(error: Exception) -> str:
    """The line of torch.load's error that says what it met; the others advise to trust the file."""
    lines = str(error).splitlines()
    met = [line for line in lines if "GLOBAL" in line or "WeightsUnpickler error" in line]
    found = (line.split("WeightsUnpickler error: ")[-1].split(". ")[0].strip() for line in met + lines)
    return next(filter(None, found), type(error).__name__)


def _culprit(value: Any, where: str = "") -> str:
    if isinstance(value, Mapping):
        parts = [(f"{where}[{key!r}]", part) for key, part in value.items()]
    elif isinstance(value, list | tuple | set):
        parts = [(f"{where}[{index}]", part) for index, part in enumerate(value)]
    elif value is None or isinstance(value, Tensor | str | bytes | bool | int | float | complex):
        return ""
    else:
        return f"{type(value).__module__}.{type(value).__qualname__}" + (f" at {where}" if where else "")
    return next(filter(None, (_culprit(part, path) for path, part in parts)), "")


def digest(value: Any) -> str:
    """Equal for equal plain data, whichever rank made it (pickles of equal values can differ)."""

    def lines(value: Any) -> Iterator[str]:
        if isinstance(value, Mapping):
            yield "{"
            for key, part in value.items():
                yield repr(key)
                yield from lines(part)
            yield "}"
        elif isinstance(value, list | tuple):
            yield type(value).__name__
            for part in value:
                yield from lines(part)
            yield "]"
        elif isinstance(value, Tensor):
            data = value.detach().cpu().contiguous()
            yield f"{value.dtype}{list(value.shape)}{hashlib.sha256(view(data)).hexdigest()}"
        elif isinstance(value, set | frozenset):
            yield f"{type(value).__name__}{sorted(map(repr, value))}"
        else:
            yield f"{type(value).__name__} {value!r}"

    return hashlib.sha256("\n".join(lines(value)).encode()).hexdigest()
