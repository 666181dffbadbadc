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

_OURS, _INSTALLED, _LIBRARY, _UNIT, _GATHER_OBJECT = range(5)
GATHER_OBJECT = "gather_object"  # in place of a unit: it begins with an all_gather of the sizes


def _kind_of(code: CodeType) -> int:
    file = code.co_filename
    if file.endswith("_fsdp_param_group.py"):
        return _UNIT
    if file.endswith("distributed_c10d.py") and code.co_name == GATHER_OBJECT:
        return _GATHER_OBJECT
    library = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))
    if file.startswith("<") and not file.startswith("<ipython"):
        return _LIBRARY
    if file.startswith(tuple(folder + os.sep for folder in library)):
        return _LIBRARY
    if f"{os.sep}site-packages{os.sep}" in file or f"{os.sep}dist-packages{os.sep}" in file:
        return _INSTALLED
    return _LIBRARY if file.startswith(sysconfig.get_path("stdlib") + os.sep) else _OURS


_kinds: dict[CodeType, int] = {}


def find_line(frame: FrameType | None) -> tuple[CodeType | None, int, str | None]:
    """The innermost line of the program among the callers, and the unit of FSDP2 that the call is for.

    GATHER_OBJECT takes the place of the unit where the call is a part of it.
    """
    unit = None
    code, line = None, 0
    while frame is not None:
        kind = _kinds.get(frame.f_code)
        if kind is None:
            kind = _kinds[frame.f_code] = _kind_of(frame.f_code)
        if kind == _OURS:
            return frame.f_code, frame.f_lineno, unit
        if kind == _INSTALLED and code is None:
            code, line = frame.f_code, frame.f_lineno
        elif kind == _UNIT and unit is None:
            unit = fsdp2_unit_of_frame(frame)
        elif kind == _GATHER_OBJECT:
            unit = GATHER_OBJECT
        frame = frame.f_back
    return code, line, unit


@functools.lru_cache(maxsize=4096)
def place_in_words(file: str, line: int) -> str:
    """A line of a file as a reader knows it: the same text on all ranks and hosts."""
    if not file:
        return "in backward"
    path = Path(file)
    in_cell = path.parent.name.startswith("ipykernel_") or file.startswith("<ipython")
    source = linecache.getline(file, line).strip()
    return (f"line {line} of the cell" if in_cell else f"at {path.name}:{line}") + (source and f" `{source}`")
