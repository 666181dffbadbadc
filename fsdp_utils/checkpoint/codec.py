"""Encode values that are not tensors as JSON, such that decoding gives the same type and every bit.

None, bool, int, str, list and finite floats are themselves in JSON, and so is a dict whose keys are all
strings. All else is an object {"!": kind, "value": ...}.
"""

import json
import math
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import keystr, tree_flatten_with_path

from fsdp_utils.checkpoint.errors import CheckpointError
from fsdp_utils.torch_internals.names import ShardedTensor

_KIND = "!"
# Types that are stored as a list of their parts; a mapping's parts are pairs of a key and a value.
_CONTAINERS: dict[str, type] = {
    one.__name__: one for one in (list, tuple, torch.Size, set, frozenset, dict, OrderedDict, Counter)
}
# Other types, with how they are written to JSON and read from it.
_ATOMS: dict[str, tuple[type, Callable[[Any], Any], Callable[[Any], Any]]] = {
    "float": (float, float.hex, float.fromhex),  # not a number, or infinite
    "bytes": (bytes, bytes.hex, bytes.fromhex),
    "device": (torch.device, str, torch.device),
    "dtype": (torch.dtype, lambda one: str(one).removeprefix("torch."), lambda name: getattr(torch, name)),
    "numpy": (
        np.generic,
        lambda one: [one.dtype.str, one.tobytes().hex()],
        lambda packed: np.frombuffer(bytes.fromhex(packed[1]), np.dtype(packed[0]))[0],
    ),
}


def encode(value: Any, where: str, tensors: dict[str, Tensor]) -> Any:
    """Encode a value for json.dumps; puts the tensors in it into `tensors`, by the path to them."""
    kind: Any = type(value)
    if value is None or kind in (bool, int, str) or (kind is float and math.isfinite(value)):
        return value
    if kind in _CONTAINERS.values():
        named = value.items() if isinstance(value, dict) else enumerate(value)
        parts = [(name, encode(part, f"{where}.{name}", tensors)) for name, part in named]
        if kind is dict and _KIND not in value and all(type(name) is str for name in value):
            return dict(parts)
        if isinstance(value, dict):
            content = [[encode(name, f"{where}, a key", tensors), part] for name, part in parts]
        else:
            content = [part for _, part in parts]
        if kind in (set, frozenset):  # the order of a set differs between processes
            content.sort(key=json.dumps)
        return content if kind is list else {_KIND: kind.__name__, "value": content}
    if kind is np.ndarray and value.dtype.kind in "biufc" and value.dtype.isnative:
        return {**encode(torch.from_numpy(np.array(value)), where, tensors), _KIND: "array"}
    if isinstance(value, Tensor) and not isinstance(value, ShardedTensor):
        if where in tensors:
            raise CheckpointError(f"{where}: expected one tensor of this name, found two")
        tensors[where] = value.detach()
        # The dimension that each dimension of a DTensor's mesh shards, None where replicated. (FSDP2 over
        # tensor parallelism has another placement, which shards a dimension too.)
        of_mesh = [getattr(one, "dim", None) for one in getattr(value, "placements", ())]
        return {_KIND: "tensor", "value": where, "dims": of_mesh}
    for name, (of_atom, pack, _) in _ATOMS.items():
        if kind is of_atom or (isinstance(value, np.generic) and of_atom is np.generic):
            return {_KIND: name, "value": pack(value)}
    raise CheckpointError(
        f"{where}: expected full tensors, DTensors, numbers, strings, bytes, None, and lists, tuples, sets "
        f"and dicts of them, found a {kind.__module__}.{kind.__qualname__}, which cannot be read back as it "
        "is. Save what it consists of, such as its .state_dict() or dict(it)"
    )


def leaves(encoded: Any) -> dict[str, str]:
    """Return the parts of what encode() has made, as JSON, by the paths to them."""
    found, _ = tree_flatten_with_path(
        encoded, is_leaf=lambda one: not one or (isinstance(one, dict) and _KIND in one)
    )
    return {keystr(path): json.dumps(part) for path, part in found}


def decode(value: Any, tensor: Callable[[str, list[int | None] | None], Any]) -> Any:
    """Decode what encode() has made, with tensor(path, dims) in the place of each tensor.

    An array shares its memory with what tensor(path, None) gives.
    """
    if isinstance(value, list):
        return [decode(part, tensor) for part in value]
    if not isinstance(value, dict):
        return value
    if _KIND not in value:
        return {key: decode(part, tensor) for key, part in value.items()}
    name, content = value[_KIND], value["value"]
    if name == "tensor":
        return tensor(content, value["dims"])
    if name == "array":
        return tensor(content, None).numpy()
    if name in _CONTAINERS:
        kind, parts = _CONTAINERS[name], decode(content, tensor)
        return kind(dict(parts) if issubclass(kind, dict) else parts)
    return _ATOMS[name][2](content)
