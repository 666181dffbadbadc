"""An exception of a rank as a reader wants to see it: the reader's own lines first."""

import linecache
import os
import re
import site
import sys
import sysconfig
import time
from dataclasses import dataclass, field
from pathlib import Path
from traceback import walk_stack, walk_tb
from types import CodeType

from fsdp_utils.distributed.rank_errors import text_of

CONTEXT_LINES = 2


@dataclass
class Failure:
    """A failure of a cell on a rank."""

    name: str  # the exception's class
    message: str
    text: str = "no place known"  # an excerpt of the lines, or where it was
    where: str | None = None  # the innermost line of the reader's own code
    in_collective: bool = False  # whether torch.distributed raised it
    time: float = field(default_factory=time.time)  # since the epoch
    seconds: float = 0.0  # since the cell began


@dataclass
class Position:
    """Where the main thread of a rank stands."""

    where: str | None = None  # the innermost line of the reader's own code
    line: int | None = None  # its number
    collective: str | None = None  # the function of torch.distributed that the line is in
    seconds: float = 0.0  # for how long it has been there
    runnable: bool = True  # whether another thread of the rank could go on


def describe(error: BaseException, source: str) -> Failure:
    """Describe an exception that was raised while the cell `source` ran."""
    message = re.sub(r"^\[\S+:\d+\] ", "", text_of(error))  # gloo begins with a path of its build machine
    found = Failure(type(error).__name__, message)
    if isinstance(error, SyntaxError):
        line = "" if error.text is None else text_of(error.text).strip()
        found.where = f"line {text_of(error.lineno)}: {line}"
        found.text, found.message = f"in this cell, {found.where}", text_of(error.msg)
        return found
    own: list[str] = []
    library: list[str] = []
    files: list[str] = []  # library code below the reader's last line
    for frame, line in walk_tb(error.__traceback__):
        code = frame.f_code
        place = _own_place(code, source)
        if place is None:
            files.append(code.co_filename)
            if own:
                library.append(f"    {_library_place(code.co_filename)}:{line} in {code.co_name}")
            continue
        library.clear()  # show the library code that lies below the reader's last line
        files.clear()
        found.where = _where(code, line)
        function = code.co_name
        own.append(f"in {place}, line {line}" + ("" if function == "<module>" else f", in {function}"))
        own.extend(_lines_around(code.co_filename, line))
    if len(library) > 6:
        library[3:-3] = [f"    ... {len(library) - 6} more"]
    if library:
        own.append("which called")
    found.text = "\n".join([*own, *library])
    cause = error.__cause__
    if cause is not None:
        found.text += f"\ncaused by {type(cause).__name__}: {text_of(cause)}"
    found.in_collective = _is_collective(files)
    return found


def position(thread: int, source: str) -> Position:
    """Where a thread that runs the cell `source` stands; for how long is left at zero.

    Keeps no frame: a frame that somebody holds when its function returns keeps the function's tensors alive.
    """
    calls = [(frame.f_code, line) for frame, line in walk_stack(sys._current_frames()[thread])]
    below: list[CodeType] = []  # library code below the reader's line
    for code, line in calls:
        if _own_place(code, source) is not None:
            below.reverse()
            in_collective = _is_collective([library.co_filename for library in below])
            name = _collective_name(below) if in_collective else None
            return Position(_where(code, line), line, name)
        below.append(code)
    return Position()


def _collective_name(calls: list[CodeType]) -> str:
    """The first function of torch.distributed's own module among these, else the last function."""
    public = [code for code in calls if code.co_filename.endswith("distributed_c10d.py")]
    return (public or calls[-1:])[0].co_name


def _where(code: CodeType, line: int) -> str:
    return f"line {line}: {linecache.getline(code.co_filename, line).strip()}"


def _is_collective(files: list[str]) -> bool:
    """Whether torch.distributed raised, or an operator that it called; the files are of library code."""
    distributed, operators = f"torch{os.sep}distributed", f"torch{os.sep}_ops.py"
    return any(distributed in file for file in files) and (
        distributed in files[-1] or files[-1].endswith(operators)
    )


def _own_place(code: CodeType, source: str) -> str | None:
    """Name the reader's code; None for library code."""
    filename = code.co_filename
    if Path(filename).parent.name.startswith("ipykernel_") or filename.startswith("<ipython"):
        text = "".join(linecache.getlines(filename))
        return "this cell" if text.strip() == source.strip() else "an earlier cell"
    if filename.startswith("<") or _library_root(filename) is not None:
        return None
    return os.path.relpath(filename) if Path(filename).exists() else None


def _library_root(filename: str) -> str | None:
    """The folder that a library file's name should be shown from; None for the reader's own files."""
    package = Path(__file__).parents[1]
    for root in (*site.getsitepackages(), sysconfig.get_path("stdlib")):
        if filename.startswith(root + os.sep):
            return root
    return str(package.parent) if filename.startswith(str(package) + os.sep) else None


def _library_place(filename: str) -> str:
    root = _library_root(filename)
    return os.path.relpath(filename, root) if root else filename


def _lines_around(filename: str, line: int) -> list[str]:
    lines = linecache.getlines(filename)
    first, last = max(1, line - CONTEXT_LINES), min(len(lines), line + CONTEXT_LINES)
    return [
        f"{'---->' if number == line else '     '} {number:>3} {lines[number - 1].rstrip()}".rstrip()
        for number in range(first, last + 1)
    ]
