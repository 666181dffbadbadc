"""Say which arguments of a collective the ranks must agree on, and compare those that differ by rank."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from itertools import groupby
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor

from fsdp_utils.collectives.c10d_hooks import Call

ROOTED = {"broadcast": "from", "reduce": "to", "gather": "to", "scatter": "from"}  # to or from one rank
REDUCING = {"all_reduce", "reduce_scatter", "reduce"}
_SHOWN = 4  # tensors of a list, in words


class Signature(NamedTuple):
    """What a rank has passed to a collective; hashable."""

    kind: str
    tensors: tuple[Any, ...]  # dtype, and shape where it counts, of those that are alike on all ranks
    op: int | None = None  # of dist.ReduceOp.RedOpType
    root: int | None = None  # its rank in the default group
    gives: tuple[int, ...] = ()  # elements to each rank, of all_to_all
    takes: tuple[int, ...] = ()  # and from each

    def agreed(self) -> str:
        """What has to be the same on all ranks. Dimensions of 1 do not count: they move no element."""
        tensors = [f"{dtype}{[n for n in shape or () if n != 1]}" for dtype, shape in self.tensors]
        return f"{self.kind}|{tensors}|{self.op}|{self.root}"

    def balance(self, own: int) -> int:
        """A number whose sum over the ranks is 0 if each rank takes what the others give it.

        Args:
            own: this rank in the group.
        """
        given = sum(_hash(own, other, number) for other, number in enumerate(self.gives))
        return given - sum(_hash(other, own, number) for other, number in enumerate(self.takes))

    def words(self) -> str:
        """Such as "reduce of float32[4, 2] by SUM to rank 0"."""
        names = [
            str(dtype).removeprefix("torch.") + ("" if shape is None else f"{list(shape)}")
            for dtype, shape in self.tensors
        ]
        runs = [(name, len(list(run))) for name, run in groupby(names)]
        shown = [name if number == 1 else f"{number} x {name}" for name, number in runs[:_SHOWN]]
        return (
            self.kind
            + (f" of {', '.join(shown)}" if shown else "")
            + (", ..." if len(runs) > _SHOWN else "")
            + (f" by {dist.ReduceOp.RedOpType(self.op).name}" if self.op is not None else "")  # pyright: ignore
            + (f" {ROOTED[self.kind]} rank {self.root}" if self.root is not None else "")
            + (f", gives {list(self.gives)} and takes {list(self.takes)} elements" if self.gives else "")
        )


def signature(call: Call, ranks: Sequence[int]) -> Signature:
    """Read the signature of a call.

    Args:
        call: before it is issued.
        ranks: those of its group, in its order.
    """
    kind, options = call.kind, call.options
    if kind == "all_to_all":
        split = isinstance(options[0], Sequence)  # one tensor on each side
        gives = _elements(call.given, options[1] if split else None, len(ranks))
        takes = _elements(call.output, options[0] if split else None, len(ranks))
        return Signature(kind, ((_flat(call.output)[0].dtype, None),), gives=gives, takes=takes)
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


def _flat(tensors: Any) -> Sequence[Tensor]:
    return (tensors,) if isinstance(tensors, Tensor) else [tensor for one in tensors for tensor in _flat(one)]


def _elements(tensors: Any, split: Sequence[int] | None, ranks: int) -> tuple[int, ...]:
    """How many elements of these tensors belong to each rank."""
    if split is None:
        return tuple(tensor.numel() for tensor in tensors)
    if not split:
        return (tensors.numel() // ranks,) * ranks
    row = tensors.numel() // max(1, tensors.size(0))
    return tuple(rows * row for rows in split)


def _hash(source: int, target: int, elements: int) -> int:
    return zlib.crc32(f"{source} {target} {elements}".encode())
