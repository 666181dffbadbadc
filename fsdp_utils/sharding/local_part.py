"""The part of a parameter that this rank holds.

`local_chunk` gives it by dimension, `pieces` by position in the flattened parameter, for FSDP1 as well: for
what must come out alike however the model is sharded, such as masks.
"""

import gc
from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from fsdp_utils.sharding.names import plain_name
from fsdp_utils.torch_internals.fsdp import Flat, fsdp1_handle, is_fsdp1_parameter
from fsdp_utils.torch_internals.names import FLAT_PARAM, detect_fake_mode


class Piece(NamedTuple):
    """This rank's part of a parameter.

    Where a tensor is split along another dimension than the first, the ranks' parts count as if they lay one
    after the other.
    """

    name: str  # without FSDP
    shape: torch.Size  # the full parameter's
    strides: tuple[int, ...]  # with FSDP1, which counts elements in the order of their memory
    offset: int  # the part begins here, in elements of the full parameter
    start: int  # and here in this rank's tensor
    numel: int


def local_chunk(tensor: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return offsets in the full tensor and sizes of this rank's part, all 0 where it is not in the mesh.

    Raises:
        ValueError: the DTensor has Partial placements: a rank holds a summand, not a part.
    """
    if not isinstance(tensor, DTensor):
        return (0,) * tensor.dim(), tuple(tensor.shape)
    if tensor.device_mesh.get_coordinate() is None:
        return (0,) * tensor.dim(), (0,) * tensor.dim()
    (chunk,) = tensor.__create_chunk_list__()
    return tuple(chunk.offsets), tuple(chunk.sizes)


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor, over the same memory and outside of autograd."""
    if not isinstance(tensor, DTensor):
        return tensor
    if not torch.is_grad_enabled():  # no_grad() takes as long as to_local()
        return tensor.to_local()
    with torch.no_grad():
        return tensor.to_local()


def is_readable(part: Tensor) -> bool:
    """Say whether its own memory holds all of its values."""
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
    """View the bytes of a contiguous CPU tensor."""
    assert tensor.is_contiguous()
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data


def pieces(named: Sequence[tuple[str, Tensor]]) -> list[list[Piece]]:
    """Return what this rank holds of each tensor: of several parameters, if it is FSDP1's flat one."""
    of_fsdp1 = _fsdp1_pieces() if any(is_fsdp1_parameter(p) for _, p in named) else {}
    return [
        [
            piece._replace(name=plain_name(name.removesuffix(FLAT_PARAM) + piece.name))
            for piece in of_fsdp1.get(id(p)) or [_piece(p)]
        ]
        for name, p in named
    ]


def _piece(param: Tensor) -> Piece:
    offsets, sizes = local_chunk(param)
    offset = sum(at * prod(sizes[:dim]) * prod(param.shape[dim + 1 :]) for dim, at in enumerate(offsets))
    return Piece("", param.shape, (), offset, 0, prod(sizes))


def _fsdp1_pieces() -> dict[int, list[Piece]]:
    """Find all parameters of the process's FSDP1 models, by id: an optimizer has only them, not the model."""
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1

    found: dict[int, list[Piece]] = {}
    modules = [thing for thing in gc.get_objects() if issubclass(type(thing), FSDP1)]
    for handle in filter(None, map(fsdp1_handle, modules)):
        flat, inside = Flat(handle.flat_param), []
        for name, shape, strides, at in zip(flat.names, flat.shapes, flat.strides, flat.shards, strict=True):
            place = (at.intra_param_start_idx, at.offset_in_shard, at.numel_in_shard)
            inside.append(Piece(name, shape, strides, *(place if at.in_shard else (0, 0, 0))))
        found[id(handle.flat_param)] = inside
        for param, piece in zip(flat.params, inside, strict=False):
            found[id(param)] = [piece._replace(name="", start=0)]
    return found
