"""Encode values that are not tensors as JSON, such that decoding gives the same type and every bit.

None, bool, int, str, list and finite floats are themselves in JSON, and so is a dict whose keys are all
strings. All else is an object {"!": kind, "value": ...}.
"""

import json
import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fsdp_utils.checkpoint.errors import CheckpointError
from fsdp_utils.torch_internals.names import ShardedTensor

_KIND = "!"
_MOST_ARRAY_BYTES = 1 << 20  # the state of a NumPy generator has 2.5 KB
# Types that are stored as a list of their parts; a mapping's parts are pairs of a key and a value.
_CONTAINERS: dict[str, type] = {
    one.__name__: one for one in (tuple, torch.Size, set, frozenset, dict, OrderedDict, Counter)
}


def _pack_array(array: Any) -> list[Any]:
    shape = list(array.shape) if isinstance(array, np.ndarray) else None
    return [array.dtype.str, shape, array.tobytes().hex()]


def _unpack_array(packed: list[Any]) -> Any:
    dtype, shape, data = packed
    flat = np.frombuffer(bytes.fromhex(data), dtype=np.dtype(dtype))
    return flat[0] if shape is None else flat.reshape(shape).copy()


# Other types, with how they are written to JSON and read from it.
_ATOMS: dict[str, tuple[Any, Callable[[Any], Any], Callable[[Any], Any]]] = {
    "float": (float, lambda value: _pack_array(np.float64(value)), lambda one: float(_unpack_array(one))),
    "complex": (complex, lambda value: _pack_array(np.array(value)), lambda one: complex(_unpack_array(one))),
    "bytes": (bytes, bytes.hex, bytes.fromhex),
    "bytearray": (bytearray, bytearray.hex, bytearray.fromhex),
    "dtype": (
        torch.dtype,
        lambda value: str(value).removeprefix("torch."),
        lambda name: getattr(torch, name),
    ),
    "device": (torch.device, str, torch.device),
    "numpy": (np.ndarray, _pack_array, _unpack_array),
}
_NAMES = {kind: name for name, (kind, *_) in _ATOMS.items()}


def encode(value: Any, where: str, tensors: dict[str, Tensor]) -> Any:
    """Encode a value for json.dumps; puts the tensors in it into `tensors`, by the path to them."""
    kind: Any = type(value)
    if value is None or kind in (bool, int, str) or (kind is float and math.isfinite(value)):
        return value
    if kind is list:
        return [encode(part, f"{where}.{index}", tensors) for index, part in enumerate(value)]
    if kind is dict and _KIND not in value and all(type(key) is str for key in value):
        return {key: encode(part, f"{where}.{key}", tensors) for key, part in value.items()}
    if kind in _CONTAINERS.values():
        if isinstance(value, dict):
            parts = [
                [encode(key, f"{where}, a key", tensors), encode(part, f"{where}.{key}", tensors)]
                for key, part in value.items()
            ]
        else:
            parts = [encode(part, f"{where}.{index}", tensors) for index, part in enumerate(value)]
        if kind in (set, frozenset):  # the order of a set differs between processes
            parts.sort(key=json.dumps)
        return {_KIND: kind.__name__, "value": parts}
    if isinstance(value, Tensor) and not isinstance(value, ShardedTensor):
        if where in tensors:
            raise CheckpointError(f"{where}: expected one tensor of this name, found two")
        tensors[where] = value.detach()
        # The dimension that each dimension of a DTensor's mesh shards, None where replicated. (FSDP2 over
        # tensor parallelism has another placement, which shards a dimension too.)
        of_mesh = [getattr(one, "dim", None) for one in getattr(value, "placements", ())]
        return {_KIND: "tensor", "value": where, "dims": of_mesh}
    name = "numpy" if isinstance(value, np.generic) else _NAMES.get(kind)
    array: Any = value
    large = name == "numpy" and (array.dtype.kind not in "biufc" or array.nbytes > _MOST_ARRAY_BYTES)
    if name is None or large:
        raise CheckpointError(
            f"{where}: expected full tensors, DTensors, numbers, strings, bytes, None, and lists, tuples, "
            f"sets and dicts of them, found a {kind.__module__}.{kind.__qualname__}, which cannot be read "
            "back as it is. Save what it consists of, such as its .state_dict(), dict(it) or "
            "torch.from_numpy(it)"
        )
    return {_KIND: name, "value": _ATOMS[name][1](value)}


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the parts of what encode() has made, with the paths to them."""
    if not isinstance(value, dict | list) or not value or _KIND in value:
        yield path, value
    else:
        for key, part in value.items() if isinstance(value, dict) else enumerate(value):
            yield from leaves(part, f"{path}[{key!r}]" if path else str(key))


def decode(value: Any, tensor: Callable[[str, list[int | None]], Any]) -> Any:
    """Decode what encode() has made, with tensor(path, dims) in the place of each tensor."""
    if isinstance(value, list):
        return [decode(part, tensor) for part in value]
    if not isinstance(value, dict):
        return value
    if _KIND not in value:
        return {key: decode(part, tensor) for key, part in value.items()}
    name, content = value[_KIND], value["value"]
    if name == "tensor":
        return tensor(content, value["dims"])
    if name in _CONTAINERS:
        kind, parts = _CONTAINERS[name], decode(content, tensor)
        return kind(dict(parts) if issubclass(kind, dict) else parts)
    return _ATOMS[name][2](content)
