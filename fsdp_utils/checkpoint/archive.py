"""Would torch.load read a file safely? Asked before it does.

With weights_only=True torch.load runs nothing that a file brings along. But a small file can still make it
take gigabytes (compressed parts, bytearray(n), torch.Tensor(n)), read beyond the end of a part (a storage
that is said to be longer than it is), or hash nested tuples until the stack overflows.
"""

import io
import math
import struct
import zipfile
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING  # private; torch.load uses these
from typing import Any, NamedTuple

from fsdp_utils.checkpoint.pickled import MOST_BYTES, Refused, check_key, interpret

_LOCAL_HEADER = struct.Struct("<4s22xHH")  # of a file in a zip archive; then its name, and more
_BYTES = ("_codecs", "encode")
_FROM_TYPE = ("torch._tensor", "_rebuild_from_type_v2")
_DICTS = (("collections", "OrderedDict"), ("collections", "Counter"))  # whose entries follow
_HASHING = (("builtins", "set"), *_DICTS)
_HASHABLE = (_BYTES, ("torch", "Size"), ("torch", "device"), ("builtins", "complex"))

# of torch.FloatStorage and so on, which say so only with a warning; torch.storage.UntypedStorage counts bytes
_ITEM_BYTES = {
    **dict.fromkeys(("ComplexDouble",), 16),
    **dict.fromkeys(("Double", "Long", "ComplexFloat"), 8),
    **dict.fromkeys(("Float", "Int", "QInt32"), 4),
    **dict.fromkeys(("Half", "BFloat16", "Short"), 2),
    **dict.fromkeys(("Char", "Byte", "Bool", "QInt8", "QUInt8", "QUInt4x2", "QUInt2x4", "Untyped"), 1),
}


class _Name(NamedTuple):
    module: str
    name: str


class _Made:
    """What a call gave."""

    def __init__(self, by: _Name) -> None:
        self.by = by

    def __hash__(self) -> int:
        """Others that torch.load makes, such as a TensorMeta, may hold tuples whose hash has no end."""
        if self.by not in _HASHABLE:
            raise Refused(f"it takes a {self.by.module}.{self.by.name} as a key")
        return id(self)


class _Content:
    """The vocabulary of what torch.save writes. torch.load itself decides which names it accepts."""

    def __init__(self, parts: dict[str, int]) -> None:
        self._parts = parts  # bytes by name

    def name(self, module: str, name: str) -> _Name:
        # torch.save writes names as before Python 3, such as __builtin__.set; torch.load takes all of those.
        module, name = NAME_MAPPING.get((module, name), (IMPORT_MAPPING.get(module, module), name))
        return _Name(module, name)

    def call(self, what: Any, arguments: tuple[Any, ...]) -> Any:
        if type(what) is not _Name:
            raise Refused(f"it calls a {type(what).__name__}")
        if what == _FROM_TYPE:
            return self.call(arguments[0], _tuple(arguments[2]))
        if what == ("builtins", "bytearray") and not all(map(_is_bytes, arguments)):
            raise Refused("it asks for a bytearray of a size")
        if what.module.startswith("torch") and what.name.endswith(("Tensor", "Storage")):
            raise Refused(f"it asks for a new {what.module}.{what.name}")
        if what == ("torch._utils", "_rebuild_qtensor") and math.prod(_tuple(arguments[2])) > sum(
            self._parts.values()
        ):
            raise Refused("it asks for a tensor that is larger than the file")
        if what in _HASHING:
            for some in arguments:
                for item in some if isinstance(some, list | tuple) else ():
                    check_key(item)
                    # the items of a dict are pairs, of which the first is hashed
                    hash(item[0] if what in _DICTS and type(item) in (list, tuple) and item else item)
        if what in _DICTS:
            return {}
        return _Made(what)

    def build(self, target: Any, state: Any) -> Any:
        return target

    def stored(self, reference: Any) -> Any:
        kind, storage, key, _, count = _tuple(reference)
        if kind != "storage" or type(storage) is not _Name or type(key) is not str or type(count) is not int:
            raise Refused("it refers to something that is no storage")
        found = self._parts.get(f"data/{key}", 0)
        if not 0 <= count * _ITEM_BYTES[storage.name.removesuffix("Storage")] <= found:
            raise Refused(f"it takes {found} bytes for {count} items of a {storage.name}")
        return _Made(storage)


def begin_of(file: io.RawIOBase | io.BufferedIOBase, stored: zipfile.ZipInfo) -> int:
    """Where the bytes of a file in the archive begin."""
    file.seek(stored.header_offset)
    magic, name_length, more_length = _LOCAL_HEADER.unpack(file.read(_LOCAL_HEADER.size) or b"")
    if magic != b"PK\3\4" or stored.compress_type != zipfile.ZIP_STORED:
        raise Refused(f"no plain bytes under {stored.filename}")
    return stored.header_offset + _LOCAL_HEADER.size + name_length + more_length


def check_archive(file: io.RawIOBase | io.BufferedIOBase) -> None:
    """Does the file hold nothing but plain bytes, and tensors no larger than they are?

    Raises:
        Refused: it does not.
        Exception: it is no such archive, or it is damaged.
    """
    with zipfile.ZipFile(file) as archive:  # type: ignore[arg-type]
        entries = archive.infolist()
        names = [entry.filename.partition("/")[2] for entry in entries]
        if len(set(names)) < len(names):
            raise Refused("two parts of one name")
        for entry in entries:
            if entry.compress_type != zipfile.ZIP_STORED or entry.file_size != entry.compress_size:
                raise Refused(f"the compressed part {entry.filename!r:.100}")
        parts = dict(zip(names, entries, strict=True))
    if (size := parts["data.pkl"].file_size) > MOST_BYTES:
        raise Refused(f"a pickle of {size} bytes, which are at most {MOST_BYTES}")
    file.seek(begin_of(file, parts["data.pkl"]))
    content = file.read(size)
    assert content is not None
    sizes = {name: entry.file_size for name, entry in parts.items()}
    interpret(content, _Content(sizes))


def _tuple(value: Any) -> tuple[Any, ...]:
    if type(value) is not tuple:
        raise Refused(f"a {type(value).__name__} in the place of a tuple")
    return value


def _is_bytes(value: Any) -> bool:
    return type(value) in (str, bytes) or (type(value) is _Made and value.by == _BYTES)
