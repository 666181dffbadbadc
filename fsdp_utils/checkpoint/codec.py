"""Values that are not tensors, as JSON: what is decoded has the type and every bit of what was encoded.

None, bool, str, list and finite numbers are themselves in JSON, and so is a dict whose keys are all strings.
All else is an object {"!": kind, "value": ...}.
"""

import base64
import json
import math
import re
import struct
from collections import Counter, OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fsdp_utils.checkpoint.errors import CheckpointError
from fsdp_utils.checkpoint.files import interpreted, read_json
from fsdp_utils.sharding.local_part import is_readable, local
from fsdp_utils.torch_internals.names import ShardedTensor

_KIND = "!"
_MOST_ARRAY_BYTES = 1 << 20  # of a NumPy array: the state of a generator has 2.5 KB
_ARRAY = re.compile(r"[<>|=][?biufc]\d{1,2}")
DTYPES = {name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
_SEQUENCES: dict[type, str] = {tuple: "tuple", torch.Size: "Size", set: "set", frozenset: "frozenset"}
_MAPPINGS: dict[type, str] = {dict: "dict", OrderedDict: "OrderedDict", Counter: "Counter"}
_BYTES: dict[type, str] = {bytes: "bytes", bytearray: "bytearray"}
_TYPES = {name: kind for kinds in (_SEQUENCES, _MAPPINGS, _BYTES) for kind, name in kinds.items()}


def encode(value: Any, where: str, tensors: dict[str, Tensor]) -> Any:
    """Encode a value for json.dumps.

    Args:
        value: None, numbers, strings, bytes, lists, tuples, sets, dicts, torch's dtypes, sizes and devices,
            NumPy's numbers and small arrays of numbers, in any combination.
        where: names the value, for errors and for its tensors.
        tensors: takes the tensors in the value, by the key under which they are to be stored: `where`, and
            the path to the tensor in the value.

    Raises:
        CheckpointError: it cannot be read back as it is; names the place.
    """
    try:
        return _encode(value, where, tensors)
    except RecursionError as error:
        raise CheckpointError(f"{where}: expected values that do not contain themselves") from error


def encode_named(values: Mapping[str, Any], prefix: str, tensors: dict[str, Tensor]) -> Any:
    """Encode values by name as one dict; a name may be any text. Each is encoded as encode() says.

    Raises:
        CheckpointError: a value cannot be read back as it is; names it, after the prefix.
    """
    encoded = {name: encode(value, prefix + name, tensors) for name, value in values.items()}
    return encoded if _KIND not in encoded else _tagged("dict", [list(pair) for pair in encoded.items()])


def _encode(value: Any, where: str, tensors: dict[str, Tensor] | None) -> Any:
    kind: Any = type(value)
    if value is None or kind in (bool, int, str):
        return value
    if kind is float:
        return value if math.isfinite(value) else _tagged("float", struct.pack(">d", value).hex())
    if kind is complex:
        return _tagged("complex", struct.pack(">dd", value.real, value.imag).hex())
    if kind is list:
        return [_encode(part, f"{where}.{index}", tensors) for index, part in enumerate(value)]
    if kind is dict and _KIND not in value and all(type(key) is str for key in value):
        return {key: _encode(part, f"{where}.{key}", tensors) for key, part in value.items()}
    if kind in _MAPPINGS:
        pairs = [
            [_encode(key, f"{where}, a key", None), _encode(part, f"{where}.{key}", tensors)]
            for key, part in value.items()
        ]
        return _tagged(_MAPPINGS[kind], pairs)
    if kind in _SEQUENCES:
        parts = [_encode(part, f"{where}.{index}", tensors) for index, part in enumerate(value)]
        if kind in (set, frozenset):  # whose order differs between processes
            parts.sort(key=json.dumps)
        return _tagged(_SEQUENCES[kind], parts)
    if kind in _BYTES:
        return _tagged(_BYTES[kind], base64.b64encode(value).decode())
    if kind is torch.dtype:
        return _tagged("dtype", str(value).removeprefix("torch."))
    if kind is torch.device:
        return _tagged("device", str(value))
    if isinstance(value, np.generic) or kind is np.ndarray:
        return _encode_array(value, where)
    if isinstance(value, ShardedTensor):
        raise CheckpointError(
            f"{where}: expected a full tensor or a DTensor, found a ShardedTensor of FSDP1, of which each "
            "rank has one part. Gather it first, or use FSDP2 (fully_shard)"
        )
    if isinstance(value, Tensor) and tensors is not None:
        if where in tensors:
            raise CheckpointError(f"{where}: expected one tensor of this name, found two")
        check_values(where, local(value))
        tensors[where] = value.detach()
        return _tagged("tensor", where)
    raise _refused(value, where)


def check_values(where: str, part: Tensor) -> None:
    """Check that a rank's part of a tensor can be stored.

    Raises:
        CheckpointError: it is on meta, sparse, freed or a container of other tensors; begins with `where`.
    """
    if not is_readable(part):
        raise CheckpointError(
            f"{where}: expected a tensor that holds its values in memory of its own, found a "
            f"{type(part).__name__} on {part.device} with layout {part.layout}"
        )


def _encode_array(value: Any, where: str) -> Any:
    if not _ARRAY.fullmatch(value.dtype.str) or value.nbytes > _MOST_ARRAY_BYTES:
        raise _refused(value, where)
    array = np.ascontiguousarray(value)
    shape = list(value.shape) if type(value) is np.ndarray else None
    data = base64.b64encode(array.tobytes()).decode()
    return _tagged("numpy", {"dtype": value.dtype.str, "shape": shape, "data": data})


def _tagged(kind: str, value: Any) -> dict[str, Any]:
    return {_KIND: kind, "value": value}


def _refused(value: Any, where: str) -> CheckpointError:
    kind = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
    remedy = "Save what it consists of"
    if hasattr(value, "state_dict"):
        remedy = "Save its .state_dict(), and give that to its load_state_dict() after loading"
    elif isinstance(value, np.ndarray):
        kind += f" of {value.dtype} with {value.nbytes} bytes"
        remedy = "Save torch.from_numpy(array), or its .tolist()"
    elif isinstance(value, Mapping):
        remedy = "Save dict(value)"
    elif hasattr(value, "_asdict"):
        remedy = "Save its ._asdict()"
    return CheckpointError(
        f"{where}: expected tensors, numbers, strings, bytes, None, and lists, tuples, sets and dicts of "
        f"them, found {kind}, which cannot be read back as it is. {remedy}"
    )


def decode(value: Any, tensors: Mapping[str, Any]) -> Any:
    """Decode what encode() has made.

    Args:
        tensors: what to put in the places of tensors, by key.

    Raises:
        Exception: any, if it is something else. files.interpreted() says of which file.
    """
    if isinstance(value, list):
        return [decode(part, tensors) for part in value]
    if not isinstance(value, dict):
        return value
    if _KIND not in value:
        return {key: decode(part, tensors) for key, part in value.items()}
    kind, content = value[_KIND], value["value"]
    if kind in _MAPPINGS.values():
        pairs = [(decode(key, tensors), decode(part, tensors)) for key, part in content]
        return _TYPES[kind](dict(pairs)) if kind == "Counter" else _TYPES[kind](pairs)
    if kind in _SEQUENCES.values():
        return _TYPES[kind](decode(list(content), tensors))
    if kind in _BYTES.values():
        return _TYPES[kind](base64.b64decode(content, validate=True))
    if kind == "float":
        return struct.unpack(">d", bytes.fromhex(content))[0]
    if kind == "complex":
        return complex(*struct.unpack(">dd", bytes.fromhex(content)))
    if kind == "dtype":
        return DTYPES[content]
    if kind == "device":
        return torch.device(content)
    if kind == "tensor":
        return tensors[content]
    if kind == "numpy":
        return _decode_array(content["dtype"], content["shape"], content["data"])
    raise ValueError(f"a value of the kind {kind!r:.80}")


def _decode_array(dtype: str, shape: list[int] | None, data: str) -> Any:
    if not _ARRAY.fullmatch(dtype):
        raise ValueError(f"an array of {dtype!r:.80}")
    flat = np.frombuffer(base64.b64decode(data, validate=True), dtype=np.dtype(dtype))
    return flat[0] if shape is None else flat.reshape(shape).copy()


def read_values(path: Path, tensors: Mapping[str, Any]) -> Any:
    """Read a JSON file of encoded values, and decode it.

    Args:
        tensors: as for decode().

    Raises:
        CheckpointDamagedError: it is missing, or something else; names the file.
    """
    with interpreted(path):
        return decode(read_json(path), tensors)
