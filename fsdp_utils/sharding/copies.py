"""Compare tensors of which several ranks hold a copy, such as hybrid sharding's replicas; make them equal.

Where they differ, gradients are averaged over different models, and a checkpoint drops some ranks' values.
"""

from collections import ChainMap, defaultdict
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch
import torch.distributed as dist
from blake3 import blake3
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel as DDP

from fsdp_utils.distributed.agreement import Ranks, agree, fingerprint, has_peers, rank_names
from fsdp_utils.sharding.local_part import is_readable, local, view
from fsdp_utils.sharding.names import plain_name
from fsdp_utils.torch_internals.fsdp import Flat, fsdp1_handle, fsdp1_replicas, registered_flat


class Copy(NamedTuple):
    """This rank's part of a tensor, which other ranks may hold too."""

    tensor: Tensor
    place: str  # the same on all ranks that should hold the same values
    replicated: bool  # False: another model's ranks may hold it, and need not be here


def parameter_copies(model: nn.Module) -> dict[str, Copy]:
    """Collect the parameters of which another rank may hold this rank's part, by plain name."""
    units = {param: unit for unit in model.modules() if isinstance(unit, FSDP1) for param in _flat(unit)}
    found = copies_of((plain_name(name), p) for name, p in model.named_parameters() if p not in units)
    for name, param in model.named_parameters():
        if unit := units.get(param):
            handle, replicas = fsdp1_handle(unit), fsdp1_replicas(unit)
            if replicas is not None or not (handle and handle.uses_sharded_strategy):
                # Ranks of other groups may hold other parts, as of tensor parallelism.
                ranks = dist.get_process_group_ranks(replicas or unit.process_group)
                found[plain_name(name)] = Copy(param, f"flat of ranks {ranks}", replicated=True)
    return found


def buffer_copies(model: nn.Module) -> dict[str, Copy]:
    """Collect all buffers, by plain name: FSDP shards none of them."""
    return copies_of((plain_name(name), buffer) for name, buffer in model.named_buffers())


def broadcasts_buffers(model: nn.Module) -> bool:
    """Whether DDP gives all ranks the first one's buffers at the next forward."""
    return any(isinstance(one, DDP) and one.broadcast_buffers for one in model.modules())


def copies_of(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Copy]:
    """Collect the tensors of which another rank may hold this rank's part, by name."""
    copies = ((name, _copy(tensor)) for name, tensor in tensors if is_readable(local(tensor)))
    return {name: copy for name, copy in copies if copy is not None}


def _copy(tensor: Tensor) -> Copy | None:
    if not isinstance(tensor, DTensor):
        return Copy(tensor, "whole", replicated=True)
    mesh, coordinate = tensor.device_mesh, tensor.device_mesh.get_coordinate()
    sharded = [dim for dim, placement in enumerate(tensor.placements) if not placement.is_replicate()]
    replicated = len(sharded) < mesh.ndim
    if coordinate is None or not (replicated or mesh.size() < dist.get_world_size()):
        return None
    place = " ".join(f"{tensor.placements[dim]} {coordinate[dim]}/{mesh.size(dim)}" for dim in sharded)
    return Copy(tensor, place or "replicated", replicated)


def _flat(unit: FSDP1) -> list[Tensor]:
    handle = fsdp1_handle(unit)
    return [] if handle is None else [registered_flat(handle), *Flat(handle.flat_param).params]


def differing(copies: Mapping[str, Copy], ranks: Ranks) -> dict[str, str]:
    """Say by name which ranks hold other values than which; all ranks take part, and return the same.

    Digests of single tensors travel only where that of all of them together differs. Not torch.hash_tensor:
    its xor of the elements stays when two of them are swapped, or both change their sign.
    """
    mine: dict[str, dict[str, str]] = defaultdict(dict)  # digests by place and name

    def hashes() -> dict[str, str]:
        for name, copy in sorted(copies.items()):
            mine[copy.place][name] = digest(copy.tensor)
        return {place: fingerprint([f"{k} {v}" for k, v in of.items()]) for place, of in mine.items()}

    together = ranks.all(hashes)
    first = dict(ChainMap(*together))
    odd = {place for one in together for place, found in one.items() if found != first[place]}
    each = ranks.all(lambda: {place: mine[place] for place in odd & mine.keys()}) if odd else []
    expected: dict[tuple[str, str], tuple[str, int]] = {}  # by place and name, the first rank's digest
    differ: dict[str, tuple[set[int], set[int]]] = defaultdict(lambda: (set(), set()))
    for rank, of_rank in enumerate(each):
        for place, name, found in ((place, *one) for place, of in of_rank.items() for one in of.items()):
            value, holder = expected.setdefault((place, name), (found, rank))
            if found != value:
                differ[name][0].add(rank)
                differ[name][1].add(holder)
    return {
        name: f"{name!r} on {rank_names(sorted(others))} differs from {rank_names(sorted(holders))}"
        for name, (others, holders) in sorted(differ.items())
    }


@torch.no_grad()
def make_replicas_equal(model: nn.Module, mesh: DeviceMesh) -> None:
    """Give all replicas the parameters and buffers of the first, as DDP does; those on meta have none."""
    if mesh.ndim == 1 or not has_peers():
        return
    group = mesh.get_group(0)
    named = {**parameter_copies(model), **buffer_copies(model)}
    alike = {name: f"{copy.tensor.dtype} {list(copy.tensor.shape)}" for name, copy in named.items()}
    ranks = agree("shard", dict, error=RuntimeError, topic="sharding")
    with ranks.guard():
        ranks.same("", alike, cure=". Build the model alike on all ranks, or on meta on all.")
    for _, copy in sorted(named.items()):
        part = local(copy.tensor.detach())
        part = part[tuple(slice(None if stride else 1) for stride in part.stride())]  # expand() repeats
        sent = part.resolve_conj().resolve_neg().contiguous()
        if part.device.type == "cpu" and dist.get_backend(group) == "nccl":  # offloaded
            sent = sent.to(torch.accelerator.current_accelerator())
        if sent.numel():  # as bytes: gloo does not know every dtype
            dist.broadcast(sent.view(-1).view(torch.uint8), group=group, group_src=0)
        if sent is not part:
            part.copy_(sent)


def digest(tensor: Tensor) -> str:
    """Hash the dtype, the shape and the values of this rank's part."""
    part = local(tensor.detach()).resolve_conj().resolve_neg().cpu().contiguous()
    kind = blake3(f"{tensor.dtype} {list(tensor.shape)}".encode(), max_threads=blake3.AUTO)
    return kind.update(view(part)).hexdigest(length=8)
