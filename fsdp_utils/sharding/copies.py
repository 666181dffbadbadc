"""Compare and broadcast tensors of which several ranks hold a copy, such as hybrid sharding's replicas.

Nothing in training compares such copies. Where they differ, gradients are averaged over models that are not
the same, and a checkpoint stores some ranks' values and drops the others'.
"""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from blake3 import blake3
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fsdp_utils.distributed.agreement import Ranks, fingerprint, has_peers, rank_names
from fsdp_utils.sharding.local_part import is_readable, local, view
from fsdp_utils.sharding.names import plain_name
from fsdp_utils.torch_internals.fsdp import Flat, fsdp1_handle, fsdp1_replicas, registered_flat

WHOLE = "whole"
_SHOWN = 3  # names in one sentence


class Copy(NamedTuple):
    """This rank's part of a tensor, which other ranks may hold too."""

    tensor: Tensor
    place: str  # the same on all ranks that should hold the same values; WHOLE for a plain tensor
    groups: tuple[Any, ...]  # process groups of those ranks, one for each replicated dimension


def parameter_copies(model: nn.Module) -> dict[str, Copy]:
    """Collect the parameters of which another rank may hold this rank's part, by plain name."""
    units = {param: unit for unit in model.modules() if isinstance(unit, FSDP1) for param in _flat(unit)}
    return _found(
        (plain_name(name), _fsdp1_copy(param, units[param]) if param in units else _copy(param))
        for name, param in model.named_parameters()
    )


def buffer_copies(model: nn.Module) -> dict[str, Copy]:
    """Collect all buffers, by plain name: FSDP shards none of them."""
    return _found((plain_name(name), _copy(buffer)) for name, buffer in model.named_buffers())


def dtensor_copies(tensors: Mapping[str, Tensor]) -> dict[str, Copy]:
    """Collect the DTensors of which another rank may hold this rank's part, by name."""
    return _found((name, _copy(tensor)) for name, tensor in tensors.items() if isinstance(tensor, DTensor))


def _found(copies: Iterable[tuple[str, Copy | None]]) -> dict[str, Copy]:
    return {name: copy for name, copy in copies if copy is not None}


def state_copies(parameters: Mapping[str, Copy], optimizers: Iterable[Optimizer]) -> dict[str, Copy]:
    """Collect what optimizers hold of them: scalars, and tensors that are sharded as the parameters are."""
    states = [one.state for one in optimizers]
    return {
        f"{name}.{key}": copy._replace(tensor=value)
        for name, copy in parameters.items()
        for state in states
        if copy.tensor in state
        for key, value in state[copy.tensor].items()
        if isinstance(value, Tensor)
        and (not value.dim() or isinstance(value, DTensor) == isinstance(copy.tensor, DTensor))
    }


def inventory(copies: Mapping[str, Copy]) -> str:
    """Hash the names, dtypes and shapes: broadcasts pair up on ranks where it is the same."""
    return fingerprint(
        [f"{name} {one.tensor.dtype} {list(one.tensor.shape)}" for name, one in sorted(copies.items())]
    )


def differing(copies: Mapping[str, Copy], ranks: Ranks) -> dict[str, str]:
    """Compare the copies' bits by their hashes; all ranks take part, and return the same.

    Digests of single tensors travel only where that of all of them together differs. A tensor on an
    accelerator is copied to the host to be hashed: torch.hash_tensor is an xor of the elements, which does
    not change when two of them are swapped, or both change their sign.

    Returns:
        By name, which ranks hold other values than which, in words; empty when all copies are equal.
    """
    mine: dict[str, dict[str, str]] = {}  # digests by place and name

    def hashes() -> dict[str, str]:
        for name, copy in sorted(copies.items()):
            mine.setdefault(copy.place, {})[name] = digest(copy.tensor)
        return {place: fingerprint([f"{k} {v}" for k, v in of.items()]) for place, of in mine.items()}

    together = ranks.all(hashes)
    places = sorted(set().union(*together))
    odd = [place for place in places if len({one[place] for one in together if place in one}) > 1]
    each = ranks.all(lambda: {place: mine[place] for place in odd if place in mine}) if odd else []
    usual: dict[tuple[str, str], tuple[int, str]] = {}  # the first rank that holds that tensor, its digest
    expected: dict[str, set[int]] = {}
    others: dict[str, set[int]] = {}
    for rank, of_rank in enumerate(each):
        for place, digests in of_rank.items():
            for name, found in digests.items():
                first, value = usual.setdefault((place, name), (rank, found))
                if found != value:
                    expected.setdefault(name, set()).add(first)
                    others.setdefault(name, set()).add(rank)
    return {
        name: f"{name!r} on {rank_names(sorted(who))} differs from {rank_names(sorted(expected[name]))}"
        for name, who in sorted(others.items())
    }


def in_words(differences: Mapping[str, str]) -> str:
    """List the first few differences."""
    more = len(differences) - _SHOWN
    return "; ".join([*differences.values()][:_SHOWN]) + (f"; and {more} more" if more > 0 else "")


def make_replicas_equal(model: nn.Module, mesh: DeviceMesh) -> None:
    """Give all replicas the parameters and buffers of the first, as DDP does; those on meta have none.

    Args:
        model: sharded over the mesh just now.
        mesh: with one dimension there are no replicas.

    Raises:
        RuntimeError: on every rank: replicas hold values of other parameters and buffers.
    """
    if mesh.ndim == 1 or not has_peers():
        return
    group = mesh.get_group(0)
    copies = {**parameter_copies(model), **buffer_copies(model)}
    found: list[Any] = [None] * group.size()
    dist.all_gather_object(found, inventory(copies), group=group)
    if len(set(found)) > 1:
        raise RuntimeError(
            "shard: expected the same parameters and buffers in all replicas, found other names, dtypes or "
            f"shapes, or values in some only, among ranks {dist.get_process_group_ranks(group)}. Build the "
            "model alike on all ranks, or on meta on all."
        )
    broadcast({name: copy._replace(groups=(group,)) for name, copy in copies.items()})


@torch.no_grad()
def broadcast(copies: Mapping[str, Copy]) -> None:
    """Give all holders of a place the values of the first of them, in place. A collective of their groups.

    All holders of a place must have the same inventory() there.
    """
    for _, copy in sorted(copies.items()):
        part = local(copy.tensor.detach())
        # Of what expand() has repeated, one of each.
        part = part[tuple(slice(None if stride else 1) for stride in part.stride())]
        for group in copy.groups:
            sent = part.resolve_conj().resolve_neg().contiguous()
            if part.device.type == "cpu" and dist.get_backend(group) == "nccl":  # offloaded
                sent = sent.to(torch.accelerator.current_accelerator())
            if sent.numel():  # as bytes: gloo does not know every dtype
                dist.broadcast(sent.view(-1).view(torch.uint8), group=group, group_src=0)
            if sent is not part:
                part.copy_(sent)


def _copy(tensor: Tensor) -> Copy | None:
    """None where no other rank can hold this rank's part, or it cannot be read."""
    if not is_readable(local(tensor)):
        return None
    if not isinstance(tensor, DTensor):
        return Copy(tensor, WHOLE, (dist.group.WORLD,))
    mesh, coordinate = tensor.device_mesh, tensor.device_mesh.get_coordinate()
    replicated = [dim for dim, placement in enumerate(tensor.placements) if placement.is_replicate()]
    if coordinate is None or not (replicated or mesh.size() < dist.get_world_size()):
        return None
    sharded = [
        f"{placement} {coordinate[dim]}/{mesh.size(dim)}"
        for dim, placement in enumerate(tensor.placements)
        if dim not in replicated
    ]
    return Copy(tensor, " ".join(sharded) or "replicated", tuple(mesh.get_group(dim) for dim in replicated))


def _fsdp1_copy(param: Tensor, unit: FSDP1) -> Copy | None:
    handle, replicas = fsdp1_handle(unit), fsdp1_replicas(unit)
    assert handle is not None
    if replicas is None and handle.uses_sharded_strategy:
        return None
    # Ranks of other groups may hold other parts, as of tensor parallelism.
    group = unit.process_group if replicas is None else replicas
    return Copy(param, f"flat of ranks {dist.get_process_group_ranks(group)}", (group,))


def _flat(unit: FSDP1) -> list[Tensor]:
    handle = fsdp1_handle(unit)
    return [] if handle is None else [registered_flat(handle), *Flat(handle.flat_param).params]


def digest(tensor: Tensor) -> str:
    """Hash the dtype, the shape and the values of this rank's part."""
    part = local(tensor.detach()).resolve_conj().resolve_neg().cpu().contiguous()
    kind = blake3(f"{tensor.dtype} {list(tensor.shape)}".encode(), max_threads=blake3.AUTO)
    return kind.update(view(part)).hexdigest(length=8)
