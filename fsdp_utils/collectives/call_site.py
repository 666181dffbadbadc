"""Describe a call of a collective: what the ranks must agree on, and which line of the program it is from."""

from __future__ import annotations

import functools
import linecache
import math
import os
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fsdp_utils.collectives.c10d_hooks import Call
from fsdp_utils.torch_internals.fsdp import fsdp2_unit_of_frame

ROOTED = {"broadcast": "from", "reduce": "to", "gather": "to", "scatter": "from"}  # to or from one rank
REDUCING = {"all_reduce", "reduce_scatter", "reduce"}
GATHER_OBJECT = "gather_object"  # in place of a unit: it begins with an all_gather of the sizes
_SHOWN = 4  # tensors of a list, in words
_PROGRAM, _INSTALLED, _LIBRARY, _UNIT, _GATHER_OBJECT = range(5)
_LIBRARIES = tuple(
    f"{folder}{os.sep}"
    for folder in (Path(torch.__file__).parent, Path(__file__).parents[1], sysconfig.get_path("stdlib"))
)


class CallSite(NamedTuple):
    """One way in which a rank calls a collective, in words; sent once from each rank to rank 0."""

    group: str  # name and ranks of the process group: parts of a split_group may share a name
    ranks: Sequence[int]  # in the order of the group
    agreed: str  # what must be the same on all ranks: the call ...
    place: str  # ... and its line, where it counts
    words: str
    gives: Sequence[int]  # elements of an all_to_all for each rank of the group, and from each
    takes: Sequence[int]


class Signature(NamedTuple):
    """The arguments of a collective on this rank, and the line of the call; hashable."""

    group: str
    kind: str
    tensors: tuple[tuple[torch.dtype, tuple[int, ...] | None], ...]  # the shape, where it counts
    op: int | None  # a dist.ReduceOp.RedOpType
    root: int | None  # its rank in the default group
    gives: tuple[int, ...]
    takes: tuple[int, ...]
    code: CodeType | None
    line: int
    unit: str | None  # FSDP2's, that the call works for

    def site(self, ranks: Sequence[int], *, by_line: bool) -> CallSite:
        """Put a call of these ranks into words: "reduce of float32[4] by SUM to rank 0, at train.py:7"."""
        has_line = by_line and self.kind not in ROOTED and self.unit != GATHER_OBJECT
        # dimensions of 1 move no element
        counted = [f"{dtype}{[n for n in shape or () if n != 1]}" for dtype, shape in self.tensors]
        shown = [f"{dtype}{'' if shape is None else list(shape)}" for dtype, shape in self.tensors[:_SHOWN]]
        shown += ["..."] * (len(self.tensors) > _SHOWN)
        words = self.kind + (f" of {', '.join(shown)}".replace("torch.", "") if shown else "")
        if self.op is not None:
            words += f" by {dist.ReduceOp.RedOpType(self.op).name}"  # pyright: ignore
        if self.root is not None:
            words += f" {ROOTED[self.kind]} rank {self.root}"
        if self.unit is not None:
            words += f", for {self.unit or 'the root'}"
        place = place_in_words(self.code, self.line)
        agreed = f"{self.kind}|{counted}|{self.op}|{self.root}|{self.unit}"
        told = agreed, place if has_line else "", f"{words}, {place}"
        return CallSite(f"{self.group} {ranks}", ranks, *told, self.gives, self.takes)


def signature(call: Call, frame: FrameType | None) -> Signature:
    """Read a call before it is issued, from this frame."""
    kind, options = call.kind, call.options
    op = root = None
    gives: tuple[int, ...] = ()
    takes: tuple[int, ...] = ()
    tensors = call.output if kind == "scatter" else call.given
    if kind == "all_gather" and not isinstance(call.output, Tensor) and len(call.output) == 1:
        sizes = {one.numel() for one in _flat(call.output)}
        tensors = call.output if len(sizes) > 1 else tensors  # NCCL gathers unequal sizes
    shapes = tuple([(tensor.dtype, tensor.shape) for tensor in _flat(tensors)])
    if kind == "all_to_all":  # a rank may give and take different numbers of elements
        rows = options[:2] if isinstance(call.output, Tensor) else ((), ())
        takes = _elements(call.output, rows[0], call.group.size())
        gives = _elements(tensors, rows[1], call.group.size())
        shapes = ((shapes[0][0], None),)
    if kind in REDUCING:
        op = options[0].op()
    if kind in ROOTED:
        root = dist.get_global_rank(call.group, options[kind == "reduce"])
    return Signature(call.group.group_name, kind, shapes, op, root, gives, takes, *find_line(frame))


def _flat(tensors: Any) -> Sequence[Tensor]:
    return (tensors,) if isinstance(tensors, Tensor) else [tensor for one in tensors for tensor in _flat(one)]


def _elements(tensors: Any, rows: Sequence[int], ranks: int) -> tuple[int, ...]:
    """Numbers of elements for each rank, of a list of tensors or of a tensor cut into so many rows."""
    if not isinstance(tensors, Tensor):
        return tuple(tensor.numel() for tensor in tensors)
    row = math.prod(tensors.shape[1:])
    return tuple(row * n for n in rows) or (tensors.numel() // ranks,) * ranks


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
    generated |= file.startswith(os.environ.get("TORCHINDUCTOR_CACHE_DIR") or "\0")  # torch sets it
    return _LIBRARY if generated or file.startswith(_LIBRARIES) else _PROGRAM


def find_line(frame: FrameType | None) -> tuple[CodeType | None, int, str | None]:
    """Find the program's innermost line among the callers, and FSDP2's unit, or GATHER_OBJECT, of the call.

    Where the program is an installed package, its innermost line.
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
    """Name a line with the same text on all ranks and hosts."""
    if code is None:
        return "in backward"
    path = Path(code.co_filename)
    in_cell = path.parent.name.startswith("ipykernel_") or code.co_filename.startswith("<ipython")
    source = linecache.getline(code.co_filename, line).strip()
    return (f"line {line} of the cell" if in_cell else f"at {path.name}:{line}") + (source and f" `{source}`")
