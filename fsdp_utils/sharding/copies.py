"""Compare and broadcast tensors of which several ranks hold a copy, such as hybrid sharding's replicas.

Ranks hold copies of the same place: of a whole parameter or buffer, or of the same shard of it. Nothing in
training compares them: where they differ, gradients are averaged over models that are not the same, and a
checkpoint stores some ranks' values and drops the others'.
"""

import threading
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

from fsdp_utils.distributed.agreement import Ranks, agree, fingerprint, has_peers, rank_names
from fsdp_utils.sharding.local_part import is_readable, local, view
from fsdp_utils.sharding.names import plain_name
from fsdp_utils.torch_internals.fsdp import Flat, fsdp1_handle, fsdp1_replicas, registered_flat

WHOLE = "whole"
_SHOWN = 3  # names in one sentence
_WAIT_S = 600.0  # in shard, for a rank that still reads or makes its weights

# Calls of the topic "sharding" must not overlap: threads of a rank would mix up its collectives.
ONE_CALL = threading.Lock()


class Copy(NamedTuple):
    """This rank's part of a tensor, which other ranks may hold too."""

    tensor: Tensor
    place: str  # the same on all ranks that should hold the same values; WHOLE for a plain tensor
    groups: tuple[Any, ...]  # process groups of those ranks, one for each replicated dimension

    @property
    def is_replica(self) -> bool:
        """Is it replicated on purpose? Else each rank may have set up a tensor of its own."""
        return self.place != WHOLE and bool(self.groups)


def parameter_copies(model: nn.Module) -> dict[str, Copy]:
    """Collect the parameters of which another rank may hold this rank's part, by name without wrappers."""
    units = {param: unit for unit in model.modules() if isinstance(unit, FSDP1) for param in _flat(unit)}
    found = {}
    for name, param in model.named_parameters():
        copy = _fsdp1_copy(param, units[param]) if param in units else _copy(param)
        if copy is not None:
            found[plain_name(name)] = copy
    return found


def buffer_copies(model: nn.Module) -> dict[str, Copy]:
    """Collect all buffers, by name without wrappers: FSDP shards none of them."""
    found = {plain_name(name): _copy(buffer) for name, buffer in model.named_buffers()}
    return {name: copy for name, copy in found.items() if copy is not None}


def dtensor_copies(tensors: Mapping[str, Tensor]) -> dict[str, Copy]:
    """Collect the DTensors of which another rank may hold this rank's part, by name."""
    found = {name: _copy(tensor) for name, tensor in tensors.items() if isinstance(tensor, DTensor)}
    return {name: copy for name, copy in found.items() if copy is not None}


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

    Digests of single tensors are exchanged only where that of all of them together differs. A tensor on an
    accelerator is copied to the host to be hashed: torch.hash_tensor is an xor of the elements, which does
    not change when two of them are swapped, or both change their sign.

    Returns:
        By name, which ranks hold other values than which, in words; empty when all copies are equal.
    """
    mine: dict[str, dict[str, str]] = {}  # digests by name, by place

    def hashes() -> dict[str, str]:
        for name, copy in copies.items():
            mine.setdefault(copy.place, {})[name] = digest(copy.tensor)
        return {
            place: fingerprint([f"{name} {digest}" for name, digest in sorted(digests.items())])
            for place, digests in mine.items()
        }

    together = ranks.all(hashes)
    places = {place for one in together for place in one}
    odd = {place for place in places if len({one[place] for one in together if place in one}) > 1}
    if not odd:
        return {}
    each = ranks.all(lambda: {place: digests for place, digests in mine.items() if place in odd})
    expected: dict[str, set[int]] = {}  # the first rank that holds the name at that place
    others: dict[str, set[int]] = {}
    for place in sorted(odd):
        for name in dict.fromkeys(name for one in each for name in one.get(place, ())):
            found = {rank: one[place][name] for rank, one in enumerate(each) if name in one.get(place, ())}
            first = min(found)
            if strange := {rank for rank, digest in found.items() if digest != found[first]}:
                expected.setdefault(name, set()).add(first)
                others.setdefault(name, set()).update(strange)
    return {
        name: f"{name!r} on {rank_names(sorted(who))} differs from {rank_names(sorted(expected[name]))}"
        for name, who in others.items()
    }


def make_equal(model: nn.Module, mesh: DeviceMesh, *, sync: bool) -> None:
    """Check that the replicas over a mesh of all ranks are equal, or make them so.

    Args:
        model: sharded over the mesh just now.
        sync: broadcast parameters from the first replica, and buffers from the first rank.

    Raises:
        RuntimeError: the same on every rank. Replicas differ, or only some ranks have values to broadcast.
    """
    if not has_peers() or mesh.size() < dist.get_world_size() or not (sync or mesh.ndim > 1):
        return
    copies = {name: copy for name, copy in parameter_copies(model).items() if copy.is_replica}
    groups = tuple(mesh.get_all_groups())
    buffers = {name: copy._replace(groups=groups) for name, copy in buffer_copies(model).items()}

    def facts() -> dict[str, Any]:
        if not sync:
            return {}
        return {
            "number of parameters and buffers with values": [len(copies), len(buffers)],
            "names, dtypes and shapes of parameters and buffers": inventory({**copies, **buffers}),
        }

    with ONE_CALL:
        ranks = agree("shard", facts, error=RuntimeError, topic="sharding", wait_s=_WAIT_S)
        with ranks.guard():
            if sync:
                broadcast({**copies, **buffers})
            differ = differing(copies, ranks)
    if differ:
        raise RuntimeError(
            f"shard: expected all replicas to hold the same values, found that {in_words(differ)}. Build the "
            "model with one seed on all ranks, or give shard sync_replicas=True, which broadcasts the first "
            "replica's. The model is sharded now: build it anew."
        )


def in_words(differences: Mapping[str, str]) -> str:
    """List the first few differences."""
    more = len(differences) - _SHOWN
    return "; ".join([*differences.values()][:_SHOWN]) + (f"; and {more} more" if more > 0 else "")


@torch.no_grad()
def broadcast(copies: Mapping[str, Copy]) -> None:
    """Give all holders of a place the values of the first of them, in place. A collective of their groups.

    All holders of a place have the same inventory() there.
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
