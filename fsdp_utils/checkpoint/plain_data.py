"""Plain data: what is not a tensor of the model or the optimizer. It is read without running code."""

import ctypes
import hashlib
import io
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fsdp_utils.checkpoint.archive import check_archive
from fsdp_utils.checkpoint.errors import CheckpointError


class PerRank(list[Any]):
    """A value that differed between the ranks, by the rank that saved it; given where the number of ranks is
    another one now, so that the program can decide what its ranks make of it."""


def pack(value: Any, what: str) -> bytes:
    """Plain data as bytes; refuses what could not be read back without running code."""
    try:
        return _packed(value)
    except Exception as error:
        where, culprit = _culprit(value)
        kind = f"{type(culprit).__module__}.{type(culprit).__qualname__}"
        raise CheckpointError(
            f"{what}: expected tensors, numbers, strings, None, and lists, tuples, sets and dicts of them, "
            f"found {kind}{where and f' at {where}'}, which cannot be read back safely ({reason(error)})."
            + _remedy(culprit)
        ) from error


def _packed(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    unpack(buffer.getvalue())
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


def _culprit(value: Any, where: str = "") -> tuple[str, Any]:
    """Where in the value the first part is that cannot be packed, and that part."""
    parts: list[tuple[str, Any]] = []
    if isinstance(value, Mapping):
        parts = [(f"{where}[{key!r}]", part) for key, part in value.items()]
    elif isinstance(value, list | tuple | set):
        parts = [(f"{where}[{index}]", part) for index, part in enumerate(value)]
    return next((_culprit(part, path) for path, part in parts if not _can_be_packed(part)), (where, value))


def _can_be_packed(value: Any) -> bool:
    try:
        _packed(value)
    except Exception:
        return False
    return True


def _remedy(culprit: Any) -> str:
    if hasattr(culprit, "state_dict"):
        return " Save its .state_dict(), and give that to its load_state_dict() after loading"
    if type(culprit).__module__ == "numpy":
        scalar = hasattr(culprit, "item") and getattr(culprit, "shape", None) == ()
        return " Save its .item()" if scalar else " Save torch.from_numpy(array), or its .tolist()"
    return " Save what it consists of"


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
            local = value.to_local() if isinstance(value, DTensor) else value  # a DTensor has no address
            data = local.detach().cpu().contiguous()
            yield f"{value.dtype}{list(value.shape)}{hashlib.sha256(view(data)).hexdigest()}"
        elif isinstance(value, set | frozenset):
            yield f"{type(value).__name__}{sorted(map(repr, value))}"
        else:
            yield f"{type(value).__name__} {value!r}"

    return hashlib.sha256("\n".join(lines(value)).encode()).hexdigest()
