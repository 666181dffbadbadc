"""The part of check_sharding that needs all ranks: are the copies of a tensor the same on all of them?"""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from fsdp_utils.distributed.agreement import Ranks, agree, has_peers
from fsdp_utils.sharding.copies import ONE_CALL, Copy, buffer_copies, differing, in_words, parameter_copies
from fsdp_utils.torch_internals.fsdp import fsdp1_replicas

_WAIT_S = 5.0  # for the other ranks; it may have been called on one rank only
_HASH_S = 600.0  # that another rank may take longer to hash its copies
_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")  # of batch norms


class _NotComparedError(RuntimeError):
    """A rank did not take part."""


def check_copies(model: nn.Module) -> list[str]:
    """Compare buffers, and parameters that several ranks hold, between all ranks."""
    if not has_peers():
        return []
    # Other groups than the tensor's own may hold other parts of it, as of tensor parallelism by hand.
    parameters = {name: copy for name, copy in parameter_copies(model).items() if copy.groups}
    ddp = [module for module in model.modules() if isinstance(module, DistributedDataParallel)]
    # DDP gives all ranks the first one's buffers at the next forward.
    buffers = {} if any(module.broadcast_buffers for module in ddp) else buffer_copies(model)
    if not (parameters or buffers):
        return []
    try:
        with ONE_CALL:
            ranks = agree(
                "check_sharding",
                dict,
                error=_NotComparedError,
                topic="sharding",
                wait_s=_WAIT_S,
                collective_s=_HASH_S,
            )
            with ranks.guard(), torch.inference_mode(False):  # in which a DTensor cannot be detached
                # One name may be that of a parameter only, or that of a buffer only.
                differ = differing(_among_peers({**parameters, **buffers}, model, ranks), ranks)
    except _NotComparedError as error:
        return [f"Buffers and copies of parameters were not compared between the ranks. {error}"]

    def among(names: Iterable[str]) -> dict[str, str]:
        return {name: differ[name] for name in names if name in differ}

    problems = []
    if found := among(name for name, copy in parameters.items() if ddp or copy.is_replica):
        problems.append(
            f"Replicas of a parameter differ: {in_words(found)}. The ranks average gradients of models that "
            "are not the same. Build the model with one seed on all ranks, or call "
            "shard(..., sync_replicas=True); if they were the same once, look for an optimizer step that "
            "only some ranks take, and for gradient sync that is off."
        )
    if found := among(name for name, copy in parameters.items() if not (ddp or copy.is_replica)):
        problems.append(
            f"Parameters that nothing shards differ between ranks: {in_words(found)}. FSDP neither sends "
            "ignored parameters nor averages their gradients. Broadcast them from rank 0 and average their "
            "gradients; or, if each rank has experts of its own, make them one DTensor: "
            "DTensor.from_local(own, mesh, [Shard(0)])."
        )
    if found := among(buffers):
        cure = "Fill them alike on all ranks, or broadcast them from rank 0 before evaluating and saving"
        if any(name.rpartition(".")[2] in _STATISTICS for name in found):
            cure += " (for batch norm's statistics: use nn.SyncBatchNorm)"
        problems.append(
            f"Buffers differ between ranks: {in_words(found)}. FSDP does not synchronise buffers: each rank "
            f"computes with its own, and a checkpoint holds rank 0's. {cure}."
        )
    return problems


def _among_peers(copies: dict[str, Copy], model: nn.Module, ranks: Ranks) -> dict[str, Copy]:
    """Tell the ranks that share this model from those that train another one, with the same names."""

    def neighbours() -> list[int]:
        meshes = {param.device_mesh for param in model.parameters() if isinstance(param, DTensor)}
        wrapped = [
            module for module in model.modules() if isinstance(module, FSDP1 | DistributedDataParallel)
        ]
        groups = {module.process_group for module in wrapped}
        groups |= {fsdp1_replicas(module) for module in wrapped if isinstance(module, FSDP1)} - {None}
        of_meshes = {rank for mesh in meshes for rank in mesh.mesh.flatten().tolist()}
        return sorted(of_meshes.union(*map(dist.get_process_group_ranks, groups)))

    by_rank = ranks.all(neighbours)
    peers: set[int] = set()
    more = set(by_rank[ranks.rank])  # empty where the model is gathered just now
    while peers != more:
        peers, more = more, more.union(*(by_rank[rank] for rank in more))
    return {name: copy._replace(place=f"{copy.place} of {sorted(peers)}") for name, copy in copies.items()}
