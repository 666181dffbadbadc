"""Find the line of the program that calls a collective, among the frames of torch and of this library."""

from __future__ import annotations

import functools
import linecache
import os
import sysconfig
from pathlib import Path
from types import CodeType, FrameType

import torch

from fsdp_utils.torch_internals.fsdp import fsdp2_unit_of_frame

_PROGRAM, _INSTALLED, _LIBRARY, _UNIT, _GATHER_OBJECT = range(5)
_LIBRARIES = tuple(
    f"{folder}{os.sep}"
    for folder in (Path(torch.__file__).parent, Path(__file__).parents[1], sysconfig.get_path("stdlib"))
)
GATHER_OBJECT = "gather_object"  # in place of a unit: it begins with an all_gather of the sizes


@functools.cache
def _kind_of(file: str, function: str) -> int:
    if file.endswith("_fsdp_param_group.py"):
        return _UNIT
    if file.endswith("distributed_c10d.py") and function == GATHER_OBJECT:
        return _GATHER_OBJECT
    installed = any(f"{os.sep}{folder}{os.sep}" in file for folder in ("site-packages", "dist-packages"))
    if installed and not file.startswith(_LIBRARIES[:2]):
        return _INSTALLED
    generated = file.startswith("<") and not file.startswith("<ipython")
    return _LIBRARY if generated or file.startswith(_LIBRARIES) else _PROGRAM


def find_line(frame: FrameType | None) -> tuple[CodeType | None, int, str | None]:
    """The innermost line of the program among the callers, and the unit of FSDP2 that the call is for.

    Where the program is an installed package, its innermost line. GATHER_OBJECT takes the place of the unit
    where the call is a part of it.
    """
    unit = None
    code, line = None, 0
    while frame is not None:
        kind = _kind_of(frame.f_code.co_filename, frame.f_code.co_name)
        if kind == _PROGRAM:
            return frame.f_code, frame.f_lineno, unit
        if kind == _INSTALLED and code is None:
            code, line = frame.f_code, frame.f_lineno
        elif kind == _UNIT and unit is None:
            unit = fsdp2_unit_of_frame(frame)
        elif kind == _GATHER_OBJECT:
            unit = GATHER_OBJECT
        frame = frame.f_back
    return code, line, unit


def place_in_words(code: CodeType | None, line: int) -> str:
    """A line as a reader knows it: the same text on all ranks and hosts."""
    if code is None:
        return "in backward"
    path = Path(code.co_filename)
    in_cell = path.parent.name.startswith("ipykernel_") or code.co_filename.startswith("<ipython")
    source = linecache.getline(code.co_filename, line).strip()
    return (f"line {line} of the cell" if in_cell else f"at {path.name}:{line}") + (source and f" `{source}`")
