"""An exception of a rank as a reader wants to see it: the reader's own lines first."""

import linecache
import os
import re
import site
import sys
import sysconfig
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from traceback import FrameSummary, StackSummary, walk_stack, walk_tb

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
    calls = StackSummary.extract(walk_tb(error.__traceback__), lookup_lines=False)
    own, library = _split(calls, source)
    lines: list[str] = []
    for call in own:
        function = "" if call.name == "<module>" else f", in {call.name}"
        lines.append(f"in {_own_place(call.filename, source)}, line {call.lineno}{function}")
        lines.extend(_lines_around(call))
    if own:
        found.where = _where(own[-1])
        below = [f"    {_library_place(one.filename)}:{one.lineno} in {one.name}" for one in library]
        if len(below) > 6:
            below[3:-3] = [f"    ... {len(below) - 6} more"]
        lines += ["which called", *below] if below else []
    found.text = "\n".join(lines)
    cause = error.__cause__
    if cause is not None:
        found.text += f"\ncaused by {type(cause).__name__}: {text_of(cause)}"
    found.in_collective = _is_collective(library)
    return found


def position(thread: int, source: str) -> Position:
    """Where a thread that runs the cell `source` stands; for how long is left at zero.

    Keeps no frame: a frame that somebody holds when its function returns keeps the function's tensors alive.
    """
    frames = walk_stack(sys._current_frames()[thread])
    own, library = _split(StackSummary.extract(frames, lookup_lines=False)[::-1], source)
    if not own:
        return Position()
    # the first function of torch.distributed's own module, else the last function
    public = [call for call in library if call.filename.endswith("distributed_c10d.py")] or library[-1:]
    name = public[0].name if _is_collective(library) else None
    return Position(_where(own[-1]), own[-1].lineno, name)


def _split(calls: Sequence[FrameSummary], source: str) -> tuple[list[FrameSummary], list[FrameSummary]]:
    """The calls of the reader's own code, and those of library code below its last line."""
    own = [index for index, call in enumerate(calls) if _own_place(call.filename, source) is not None]
    return [calls[index] for index in own], [*calls[own[-1] + 1 if own else 0 :]]


def _where(call: FrameSummary) -> str:
    return f"line {call.lineno}: {linecache.getline(call.filename, call.lineno or 0).strip()}"


def _is_collective(library: Sequence[FrameSummary]) -> bool:
    """Whether torch.distributed raised or waits, or an operator that it called."""
    files = [call.filename for call in library]
    distributed, operators = f"torch{os.sep}distributed", f"torch{os.sep}_ops.py"
    return any(distributed in file for file in files) and (
        distributed in files[-1] or files[-1].endswith(operators)
    )


def _own_place(filename: str, source: str) -> str | None:
    """Name the reader's code; None for library code."""
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


def _lines_around(call: FrameSummary) -> list[str]:
    lines, line = linecache.getlines(call.filename), call.lineno or 0
    first, last = max(1, line - CONTEXT_LINES), min(len(lines), line + CONTEXT_LINES)
    return [
        f"{'---->' if number == line else '     '} {number:>3} {lines[number - 1].rstrip()}".rstrip()
        for number in range(first, last + 1)
    ]
