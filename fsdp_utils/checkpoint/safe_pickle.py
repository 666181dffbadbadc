"""Read pickles without running anything: interpret what describes data, refuse all else.

pickle.Unpickler calls what a file names, its BUILD sets attributes of whatever object it is given, of classes
too, and a small file can make it take gigabytes (a number in the memo, bytearray(n)) or hash nested tuples
until the stack overflows. A find_class() of one's own prevents only the first. This interpreter knows the few
instructions that data needs. A vocabulary says what a name stands for, and makes every object itself.
"""

import io
import math
import pickletools
import struct
import zipfile
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING  # private; torch.load uses these
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple, Protocol

# Of a pickle: what describes two million chunks has less. A file may be larger than its disk.
MOST_BYTES = 512 << 20
_MOST_KEY_PARTS = 1000  # of a dict's key that is a tuple; a legitimate one has three or four


class Refused(ValueError):
    """The pickle holds something other than data."""


class Vocabulary(Protocol):
    """What the names in one pickle stand for. None of these may run code of the pickle's choice."""

    def name(self, module: str, name: str) -> Any:
        """Return what stands for that name. It must not be the class or function itself."""
        ...

    def call(self, what: Any, arguments: tuple[Any, ...]) -> Any:
        """Return what calling that would give."""
        ...

    def build(self, target: Any, state: Any) -> Any:
        """Return the target with that state."""
        ...

    def persistent_load(self, reference: Any) -> Any:
        """Return what lies outside of the pickle under that persistent id."""
        ...


def interpret(data: bytes, vocabulary: Vocabulary) -> Any:
    """Load the data in a pickle: plain containers, and what the vocabulary makes.

    Memory and time grow with the length of the pickle and with nothing else.

    Raises:
        Refused: it asks for something that is no data.
        Exception: it is damaged (IndexError, KeyError, TypeError, ValueError ...).
    """
    stack: list[Any] = []
    marks: list[int] = []
    memo: dict[int, Any] = {}

    def to_mark() -> list[Any]:
        begin = marks.pop()
        items = stack[begin:]
        del stack[begin:]
        return items

    def pop_two() -> list[Any]:
        second, first = stack.pop(), stack.pop()
        return [first, second]

    def to_tuple(count: int) -> None:
        stack[-count:] = [tuple(stack[-count:])]

    def call(_: None) -> None:
        arguments = stack.pop()
        if type(arguments) is not tuple:
            raise Refused(f"arguments that are a {type(arguments).__name__}")
        stack[-1] = vocabulary.call(stack[-1], arguments)

    def build(_: None) -> None:
        state = stack.pop()
        stack[-1] = vocabulary.build(stack[-1], state)

    def set_items(items: list[Any]) -> None:
        target = stack[-1]
        if type(target) is not dict:
            raise Refused(f"entries for a {type(target).__name__}")
        for key, value in zip(items[::2], items[1::2], strict=True):
            target[key if type(key) is str else check_key(key)] = value

    def append(items: list[Any]) -> None:
        if type(stack[-1]) is not list:
            raise Refused(f"items for a {type(stack[-1]).__name__}")
        stack[-1].extend(items)

    def name(module: Any, name: Any) -> None:
        if type(module) is not str or type(name) is not str:
            raise Refused("a name that is no text")
        stack.append(vocabulary.name(module, name))

    def persistent_load(_: None) -> None:
        stack[-1] = vocabulary.persistent_load(stack[-1])

    def put(number: int) -> None:
        memo[number] = stack[-1]

    # what to do, given the argument that stands in the pickle behind the opcode, or None
    push = stack.append
    instructions: dict[str, Callable[[Any], object]] = {
        **dict.fromkeys(("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT"), push),
        **dict.fromkeys(("SHORT_BINUNICODE", "BINUNICODE", "SHORT_BINBYTES", "BINBYTES"), push),
        **dict.fromkeys(("BINGET", "LONG_BINGET"), lambda number: push(memo[number])),
        **dict.fromkeys(("BINPUT", "LONG_BINPUT"), put),
        **dict.fromkeys(("PROTO", "FRAME"), lambda _: None),
        **dict.fromkeys(("NEWOBJ", "REDUCE"), call),
        "NONE": push,
        "NEWTRUE": lambda _: push(True),
        "NEWFALSE": lambda _: push(False),
        "MEMOIZE": lambda _: put(len(memo)),
        "MARK": lambda _: marks.append(len(stack)),
        "EMPTY_TUPLE": lambda _: push(()),
        "EMPTY_DICT": lambda _: push({}),
        "EMPTY_LIST": lambda _: push([]),
        "TUPLE1": lambda _: to_tuple(1),
        "TUPLE2": lambda _: to_tuple(2),
        "TUPLE3": lambda _: to_tuple(3),
        "TUPLE": lambda _: push(tuple(to_mark())),
        "BUILD": build,
        "SETITEMS": lambda _: set_items(to_mark()),
        "SETITEM": lambda _: set_items(pop_two()),
        "APPENDS": lambda _: append(to_mark()),
        "APPEND": lambda _: append([stack.pop()]),
        "GLOBAL": lambda names: name(*names.split(" ", 1)),
        "STACK_GLOBAL": lambda _: name(*pop_two()),
        "BINPERSID": persistent_load,
    }
    for opcode, argument, _ in pickletools.genops(data):
        if opcode.name == "STOP":
            return stack.pop()
        if opcode.name not in instructions:
            raise Refused(f"the instruction {opcode.name}, which no data needs")
        instructions[opcode.name](argument)
    raise Refused("no end")


def check_key(key: Any) -> Hashable:
    """Refuse a key of many nested tuples: Python computes their hashes anew each time, in nested calls."""
    left, parts = _MOST_KEY_PARTS, [key]
    while parts:
        part, left = parts.pop(), left - 1
        if type(part) is tuple:
            parts += part[: left + 1]
        if left < 0:
            raise Refused("a key of too many parts")
    return key


# ---- what torch.save writes -------------------------------------------------------------------------


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
    """The result of a call, which was not made."""

    def __init__(self, by: _Name) -> None:
        self.by = by

    def __hash__(self) -> int:
        """Refuse what may hold tuples whose hash takes forever, such as a TensorMeta."""
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

    def persistent_load(self, reference: Any) -> Any:
        kind, storage, key, _, count = _tuple(reference)
        if kind != "storage" or type(storage) is not _Name or type(key) is not str or type(count) is not int:
            raise Refused("it refers to something that is no storage")
        found = self._parts.get(f"data/{key}", 0)
        if not 0 <= count * _ITEM_BYTES[storage.name.removesuffix("Storage")] <= found:
            raise Refused(f"it takes {found} bytes for {count} items of a {storage.name}")
        return _Made(storage)


def begin_of(file: io.RawIOBase | io.BufferedIOBase, stored: zipfile.ZipInfo) -> int:
    """Find where the bytes of a file in the archive begin."""
    file.seek(stored.header_offset)
    magic, name_length, more_length = _LOCAL_HEADER.unpack(file.read(_LOCAL_HEADER.size) or b"")
    if magic != b"PK\3\4" or stored.compress_type != zipfile.ZIP_STORED:
        raise Refused(f"no plain bytes under {stored.filename}")
    return stored.header_offset + _LOCAL_HEADER.size + name_length + more_length


def check_archive(file: io.RawIOBase | io.BufferedIOBase) -> None:
    """Check that torch.load would read a file safely.

    With weights_only=True torch.load runs nothing that a file brings along. But a small file can still make
    it take gigabytes (compressed parts, bytearray(n), torch.Tensor(n)), read beyond the end of a part (a
    storage that is said to be longer than it is), or hash nested tuples until the stack overflows.

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
