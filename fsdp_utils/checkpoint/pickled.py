"""Interpret a pickle without importing or calling anything that it names.

pickle.Unpickler calls what a file names, and its BUILD sets attributes of whatever object it is given, of
classes too. This interpreter knows the few instructions that a description of data needs. A vocabulary says
what a name stands for, and makes every object itself.
"""

import pickletools
from collections.abc import Callable, Hashable
from typing import Any, Protocol

# Of a pickle: what describes two million chunks has less. A file may be larger than its disk.
MOST_BYTES = 512 << 20
_MOST_KEY_PARTS = 1000  # of a dict's key that is a tuple; a legitimate one has three or four


class Refused(ValueError):
    """The pickle holds something else than data."""


class Vocabulary(Protocol):
    """What the names in one pickle stand for. None of these may run code of the pickle's choice."""

    def name(self, module: str, name: str) -> Any:
        """What stands for that name. It must not be the class or function itself."""
        ...

    def call(self, what: Any, arguments: tuple[Any, ...]) -> Any:
        """What calling that would give."""
        ...

    def build(self, target: Any, state: Any) -> Any:
        """What the target is with that state."""
        ...

    def stored(self, reference: Any) -> Any:
        """What lies outside of the pickle under that persistent id."""
        ...


def interpret(data: bytes, vocabulary: Vocabulary) -> Any:
    """The data in a pickle, made of plain containers and what the vocabulary makes.

    Memory and time grow with the length of the pickle and with nothing else.

    Raises:
        Refused: it asks for something that is no data.
        Exception: it is damaged (IndexError, KeyError, TypeError, ValueError ...).
    """
    stack: list[Any] = []
    marks: list[int] = []
    memo: dict[int, Any] = {}
    push = stack.append

    def to_mark() -> list[Any]:
        begin = marks.pop()
        items = stack[begin:]
        del stack[begin:]
        return items

    def to_tuple(count: int) -> None:
        stack[-count:] = [tuple(stack[-count:])]

    def call() -> None:
        arguments = stack.pop()
        if type(arguments) is not tuple:
            raise Refused(f"arguments that are a {type(arguments).__name__}")
        stack[-1] = vocabulary.call(stack[-1], arguments)

    def build() -> None:
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
        push(vocabulary.name(module, name))

    def stored() -> None:
        stack[-1] = vocabulary.stored(stack[-1])

    def pop_two() -> list[Any]:
        second, first = stack.pop(), stack.pop()
        return [first, second]

    def memoize() -> None:
        memo[len(memo)] = stack[-1]

    def put(number: int) -> None:
        memo[number] = stack[-1]

    without_argument: dict[str, Callable[[], object]] = {
        "MEMOIZE": memoize,
        "MARK": lambda: marks.append(len(stack)),
        "EMPTY_TUPLE": lambda: push(()),
        "EMPTY_DICT": lambda: push({}),
        "EMPTY_LIST": lambda: push([]),
        "TUPLE1": lambda: to_tuple(1),
        "TUPLE2": lambda: to_tuple(2),
        "TUPLE3": lambda: to_tuple(3),
        "TUPLE": lambda: push(tuple(to_mark())),
        "NEWOBJ": call,
        "REDUCE": call,
        "BUILD": build,
        "SETITEMS": lambda: set_items(to_mark()),
        "SETITEM": lambda: set_items(pop_two()),
        "APPENDS": lambda: append(to_mark()),
        "APPEND": lambda: append([stack.pop()]),
        "NONE": lambda: push(None),
        "NEWTRUE": lambda: push(True),
        "NEWFALSE": lambda: push(False),
        "STACK_GLOBAL": lambda: name(*pop_two()),
        "BINPERSID": stored,
    }
    with_argument: dict[str, Callable[[Any], object]] = {
        **dict.fromkeys(("BINGET", "LONG_BINGET"), lambda number: push(memo[number])),
        **dict.fromkeys(("BINPUT", "LONG_BINPUT"), put),
        **dict.fromkeys(("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT"), push),
        **dict.fromkeys(("SHORT_BINUNICODE", "BINUNICODE", "SHORT_BINBYTES", "BINBYTES"), push),
        **dict.fromkeys(("PROTO", "FRAME"), lambda number: None),
        "GLOBAL": lambda names: name(*names.split(" ", 1)),
    }
    for opcode, argument, _ in pickletools.genops(data):
        if (do := without_argument.get(opcode.name)) is not None:
            do()
        elif (do_with := with_argument.get(opcode.name)) is not None:
            do_with(argument)
        elif opcode.name == "STOP":
            return stack.pop()
        else:
            raise Refused(f"the instruction {opcode.name}, which no data needs")
    raise Refused("no end")


def check_key(key: Any) -> Hashable:
    """A key whose hash takes little: Python computes a tuple's anew each time, in nested calls."""
    left, parts = _MOST_KEY_PARTS, [key]
    while parts:
        part, left = parts.pop(), left - 1
        if type(part) is tuple:
            parts += part[: left + 1]
        if left < 0:
            raise Refused("a key of too many parts")
    return key
