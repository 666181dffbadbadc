"""Say which arguments of a collective the ranks must agree on."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fsdp_utils.collectives.c10d_hooks import Call

ROOTED = {"broadcast": "from", "reduce": "to", "gather": "to", "scatter": "from"}  # to or from one rank
REDUCING = {"all_reduce", "reduce_scatter", "reduce"}
_SHOWN = 4  # tensors of a list, in words


class Signature(NamedTuple):
    """What a rank has passed to a collective; hashable."""

    kind: str
    tensors: tuple[tuple[torch.dtype, tuple[int, ...] | None], ...]  # the shape, where it counts
    op: int | None = None  # of dist.ReduceOp.RedOpType
    root: int | None = None  # its rank in the default group
    gives: tuple[int, ...] = ()  # of an all_to_all: elements for each rank of the group, and from each
    takes: tuple[int, ...] = ()

    def agreed(self) -> str:
        """What has to be the same on all ranks. Dimensions of 1 do not count: they move no element."""
        tensors = [f"{dtype}{[n for n in shape or () if n != 1]}" for dtype, shape in self.tensors]
        return f"{self.kind}|{tensors}|{self.op}|{self.root}"

    def words(self) -> str:
        """Such as "reduce of float32[4, 2] by SUM to rank 0"."""
        names = [
            str(dtype).removeprefix("torch.") + ("" if shape is None else f"{list(shape)}")
            for dtype, shape in self.tensors
        ]
        shown = names[:_SHOWN] + ["..."] * (len(names) > _SHOWN)
        return (
            self.kind
            + (f" of {', '.join(shown)}" if shown else "")
            + (f" by {dist.ReduceOp.RedOpType(self.op).name}" if self.op is not None else "")  # pyright: ignore
            + (f" {ROOTED[self.kind]} rank {self.root}" if self.root is not None else "")
        )


def signature(call: Call, ranks: Sequence[int]) -> Signature:
    """Read the signature of a call.

    Args:
        call: before it is issued.
        ranks: those of its group, in its order.
    """
    kind, options = call.kind, call.options
    if kind == "all_to_all":  # a rank may give and take different numbers of elements
        takes, gives = options[:2] if isinstance(call.output, Tensor) else ((), ())
        sizes = _elements(call.given, gives, len(ranks)), _elements(call.output, takes, len(ranks))
        return Signature(kind, ((_flat(call.output)[0].dtype, None),), None, None, *sizes)
    tensors = call.output if kind == "scatter" else call.given
    if kind == "all_gather" and not isinstance(call.output, Tensor) and len(call.output) == 1:
        sizes = {one.numel() for one in _flat(call.output)}
        tensors = call.output if len(sizes) > 1 else tensors  # of unequal sizes, which NCCL gathers
    return Signature(
        kind,
        tuple([(tensor.dtype, tensor.shape) for tensor in _flat(tensors)]),
        options[0].op() if kind in REDUCING else None,
        ranks[options[kind == "reduce"]] if kind in ROOTED else None,
    )


def _elements(tensors: Any, rows: Sequence[int], ranks: int) -> tuple[int, ...]:
    """Numbers of elements for each rank, of a list of tensors or of a tensor cut into so many rows."""
    if not isinstance(tensors, Tensor):
        return tuple(tensor.numel() for tensor in tensors)
    row = math.prod(tensors.shape[1:])
    return tuple(row * n for n in rows) or (tensors.numel() // ranks,) * ranks


def _flat(tensors: Any) -> Sequence[Tensor]:
    return (tensors,) if isinstance(tensors, Tensor) else [tensor for one in tensors for tensor in _flat(one)]
