"""The part of a parameter that this rank holds.

`local_chunk` gives it by dimension, `places` by position in the flattened parameter, for FSDP1 as well: for
what must come out alike however the model is sharded, such as masks.
"""

import ctypes
import gc
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from fsdp_utils.sharding.names import plain_name
from fsdp_utils.torch_internals.fsdp import Flat, fsdp1_handle, is_fsdp1_parameter
from fsdp_utils.torch_internals.names import FLAT_PARAM, detect_fake_mode


@dataclass(frozen=True)
class Member:
    """This rank's part of a parameter inside FSDP1's flat parameter."""

    name: str  # within its FSDP unit
    shape: torch.Size
    strides: tuple[int, ...]
    offset: int  # the part begins here, in elements of the full parameter
    start: int  # and here in this rank's flat parameter
    numel: int


@dataclass(frozen=True)
class Place:
    """This rank's part of a parameter: `numel` contiguous elements from `offset` on.

    Where a tensor is split along another dimension than the first, the ranks' parts count as if they lay one
    after the other.
    """

    shape: torch.Size  # the full parameter's
    offset: int
    numel: int
    members: tuple[Member, ...] = ()  # inside FSDP1's flat parameter
    strides: tuple[int, ...] = ()  # with FSDP1, which counts elements in the order of their memory

    @property
    def padding(self) -> int:
        """Elements of padding at the end: FSDP1 makes the ranks' parts equal."""
        return min(self.numel, max(0, self.offset + self.numel - self.shape.numel()))


def local_chunk(tensor: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Offsets in the full tensor, and sizes, of this rank's part, by dimension.

    On a rank that is not in the DTensor's mesh, all of them are 0.

    Raises:
        ValueError: the DTensor has Partial placements: a rank holds a summand, not a part.
    """
    if not isinstance(tensor, DTensor):
        return (0,) * tensor.dim(), tuple(tensor.shape)
    if tensor.device_mesh.get_coordinate() is None:
        return (0,) * tensor.dim(), (0,) * tensor.dim()
    (chunk,) = tensor.__create_chunk_list__()
    return tuple(chunk.offsets), tuple(chunk.sizes)


def places(params: Sequence[Tensor]) -> list[Place]:
    """The place of this rank's part of each parameter."""
    fsdp1 = _fsdp1_places() if any(map(is_fsdp1_parameter, params)) else {}
    return [
        _dtensor_place(p) if isinstance(p, DTensor) else fsdp1.get(id(p)) or Place(p.shape, 0, p.numel())
        for p in params
    ]


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor, over the same memory."""
    if not isinstance(tensor, DTensor):
        return tensor
    if not torch.is_grad_enabled():  # to_local() gives the part itself then, and not autograd's view of it
        return tensor.to_local()
    with torch.no_grad():
        return tensor.to_local()


def is_readable(part: Tensor) -> bool:
    """Does its own memory hold all of its values?"""
    return not (
        part.is_meta
        or is_traceable_wrapper_subclass(part)
        or part.layout != torch.strided  # sparse tensors
        or part.is_nested
        or part.is_quantized
        or detect_fake_mode([part]) is not None
        or (part.numel() and not part.untyped_storage().nbytes())  # freed: reading it ends the process
    )


def view(tensor: Tensor) -> memoryview:
    """View the bytes of a contiguous CPU tensor. Valid as long as the tensor exists."""
    assert tensor.device.type == "cpu"
    assert tensor.is_contiguous()
    if tensor.nbytes == 0:
        return memoryview(b"")
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


def as_dtensor(part: Tensor, like: DTensor) -> DTensor:
    """The DTensor made of the ranks' parts, sharded like another one."""
    return DTensor.from_local(
        part, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def member_names(name: str, place: Place) -> list[str]:
    """The names of the parameters inside FSDP1's flat parameter `name`."""
    unit = plain_name(name).removesuffix(FLAT_PARAM)
    return [unit + member.name for member in place.members]


def _dtensor_place(param: DTensor) -> Place:
    offsets, sizes = local_chunk(param)
    offset = sum(
        offset * prod(sizes[:dim]) * prod(param.shape[dim + 1 :]) for dim, offset in enumerate(offsets)
    )
    return Place(param.shape, offset, prod(sizes))


def _fsdp1_places() -> dict[int, Place]:
    """By id, all parameters of the process's FSDP1 models: an optimizer has only them, not the model."""
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1

    found: dict[int, Place] = {}
    modules = [thing for thing in gc.get_objects() if issubclass(type(thing), FSDP1)]
    for handle in filter(None, map(fsdp1_handle, modules)):
        flat = Flat(handle.flat_param)
        members = tuple(
            Member(
                name, shape, strides, info.intra_param_start_idx, info.offset_in_shard, info.numel_in_shard
            )
            if info.in_shard
            else Member(name, shape, strides, 0, 0, 0)
            for name, shape, strides, info in zip(
                flat.names, flat.shapes, flat.strides, flat.shards, strict=True
            )
        )
        numel = flat.shard_shape.numel()
        offset = handle.rank * numel if handle.uses_sharded_strategy else 0  # NO_SHARD, or one rank alone
        found[id(handle.flat_param)] = Place(flat.full_shape, offset, numel, members)
        for param, member in zip(flat.params, members, strict=False):
            found[id(param)] = Place(member.shape, member.offset, member.numel, strides=member.strides)
    return found
