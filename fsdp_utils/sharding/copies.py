"""Compare tensors of which several ranks hold a copy, such as hybrid sharding's replicas.

Where they differ, gradients are averaged over different models, and a checkpoint drops some ranks' values.
"""

from collections import ChainMap, defaultdict
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch.distributed as dist
from blake3 import blake3
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel as DDP

from fsdp_utils.distributed.agreement import Ranks, fingerprint, rank_names
from fsdp_utils.sharding.local_part import is_readable, local, view
from fsdp_utils.sharding.names import plain_name
from fsdp_utils.torch_internals.fsdp import fsdp1_handle, fsdp1_replicas, is_fsdp1_parameter
from fsdp_utils.torch_internals.names import FLAT_PARAM


class Copy(NamedTuple):
    """This rank's part of a tensor, which other ranks may hold too."""

    tensor: Tensor
    place: str  # the same on all ranks that should hold the same values
    replicated: bool  # False: another model's ranks may hold it, and need not be here


def parameter_copies(model: nn.Module) -> dict[str, Copy]:
    """Collect the parameters of which another rank may hold this rank's part, by plain name."""
    named = ((n, p) for n, p in model.named_parameters() if not is_fsdp1_parameter(p))
    found = copies_of((plain_name(name), parameter) for name, parameter in named)
    for name, unit in model.named_modules():
        if isinstance(unit, FSDP1) and (handle := fsdp1_handle(unit)):
            replicas = fsdp1_replicas(unit)
            if replicas is not None or not handle.uses_sharded_strategy:
                # Ranks of other groups may hold other parts, as of tensor parallelism.
                ranks = dist.get_process_group_ranks(replicas or unit.process_group)
                copy = Copy(handle.flat_param, f"flat of ranks {ranks}", replicated=True)
                found[plain_name(name, FLAT_PARAM)] = copy
    return found


def broadcasts_buffers(model: nn.Module) -> bool:
    """Whether DDP gives all ranks the first one's buffers at the next forward."""
    return any(isinstance(one, DDP) and one.broadcast_buffers for one in model.modules())


def copies_of(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Copy]:
    """Collect the tensors of which another rank may hold this rank's part, by name."""
    found: dict[str, Copy] = {}
    for name, tensor in tensors:
        if not is_readable(local(tensor)):
            continue
        place, replicated = "whole", True
        if isinstance(tensor, DTensor):
            mesh, coordinate = tensor.device_mesh, tensor.device_mesh.get_coordinate()
            sharded = [dim for dim, placement in enumerate(tensor.placements) if not placement.is_replicate()]
            replicated = len(sharded) < mesh.ndim
            if coordinate is None or not (replicated or mesh.size() < dist.get_world_size()):
                continue
            place = " ".join(
                f"{tensor.placements[dim]} {coordinate[dim]}/{mesh.size(dim)}" for dim in sharded
            )
        found[name] = Copy(tensor, place, replicated)
    return found


def differing(copies: Mapping[str, Copy], ranks: Ranks) -> dict[str, str]:
    """Say by name which ranks hold other values than which; all ranks take part, and return the same.

    Digests of single tensors travel only where that of all of them together differs. Not torch.hash_tensor:
    its xor of the elements stays when two of them are swapped, or both change their sign.
    """
    mine: dict[str, dict[str, str]] = defaultdict(dict)  # digests by place and name

    def hashes() -> dict[str, str]:
        for name, copy in sorted(copies.items()):
            mine[copy.place][name] = _digest(copy.tensor)
        return {place: fingerprint([f"{k} {v}" for k, v in of.items()]) for place, of in mine.items()}

    together = ranks.all(hashes)
    first = dict(ChainMap(*together))
    odd = {place for one in together for place, found in one.items() if found != first[place]}
    each = ranks.all(lambda: {(name, place): mine[place][name] for place in odd for name in mine[place]})
    firsts: dict[tuple[str, str], int] = {}  # by name and place, the first rank that holds it
    differ: dict[str, tuple[set[int], set[int]]] = defaultdict(lambda: (set(), set()))
    for rank, digests in enumerate(each):
        for (name, place), found in digests.items():
            holder = firsts.setdefault((name, place), rank)
            if found != each[holder][name, place]:
                differ[name][0].add(rank)
                differ[name][1].add(holder)
    return {
        name: f"{name!r} on {rank_names(sorted(others))} differs from {rank_names(sorted(holders))}"
        for name, (others, holders) in sorted(differ.items())
    }


def _digest(tensor: Tensor) -> str:
    """Hash the dtype, the shape and the values of this rank's part."""
    part = local(tensor.detach()).resolve_conj().resolve_neg().cpu().contiguous()
    kind = blake3(f"{tensor.dtype} {list(tensor.shape)}".encode(), max_threads=blake3.AUTO)
    return kind.update(view(part)).hexdigest(length=8)
