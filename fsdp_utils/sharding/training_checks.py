"""The part of check_sharding about training: what the optimizer holds, gradient sync, copies that differ."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from fsdp_utils.distributed.agreement import agree, has_peers
from fsdp_utils.sharding.copies import WHOLE, buffer_copies, differing, in_words, parameter_copies
from fsdp_utils.sharding.names import plain_name
from fsdp_utils.sharding.units import ROOT, Unit
from fsdp_utils.torch_internals.fsdp import fsdp1_replicas, fsdp1_syncs, fsdp2_syncs

# Optimizers whose step() is defined here update the parameter itself, without a float32 copy of it.
_WITHOUT_MASTERS = ("torch.optim.", "fsdp_utils.")
_WAIT_S = 5.0  # for the other ranks; it may have been called on one rank only
_HASH_S = 600.0  # that another rank may take longer to hash its copies
_REPLICAS, _LOOSE, _BUFFERS = "Replicas of a parameter", "Parameters that nothing shards", "Buffers"
_CURES = {
    _REPLICAS: "The ranks average gradients of models that are not the same. Build the model with one seed "
    "on all ranks; if they were the same once, look for an optimizer step that only some ranks take, and for "
    "gradient sync that is off.",
    _LOOSE: "FSDP neither sends ignored parameters nor averages their gradients. Broadcast them from rank 0 "
    "and average their gradients; or, if each rank has experts of its own, make them one DTensor: "
    "DTensor.from_local(own, mesh, [Shard(0)]).",
    _BUFFERS: "FSDP does not synchronise buffers: each rank computes with its own, and a checkpoint holds "
    "rank 0's. Broadcast them from rank 0 before evaluating and saving (for batch norm's statistics: use "
    "nn.SyncBatchNorm).",
}


class _NotComparedError(RuntimeError):
    """A rank did not take part."""


def check_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, units: list[Unit]) -> list[str]:
    """Find an optimizer of other parameters than the sharded ones."""
    gathered = {parameter for unit in units for parameter in unit.gathered}
    sharded = {parameter for unit in units for parameter in unit.sharded}
    own = sharded | (set(model.parameters()) - gathered)
    given = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    strangers = given - own
    if not strangers or all(parameter in given for parameter in own if parameter.requires_grad):
        return []
    return [
        f"The optimizer holds {len(strangers)} parameters that are not the sharded model's: from before "
        "sharding, or gathered, as the root's are from the first forward on. Its steps do not change the "
        "model. Build the optimizer from model.parameters() after sharding, before the first forward (or "
        "call model.reshard() before)."
    ]


def check_master_weights(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    """Find trainable parameters held in bf16 or fp16 under an optimizer that is known to keep no masters."""
    while isinstance(inner := getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        optimizer = inner  # inside of Accelerate's
    # Those of the optimizer: between forward and backward the model may hold gathered copies in bf16.
    low = [
        parameter
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter.requires_grad and parameter.dtype in (torch.bfloat16, torch.float16)
    ]
    if not low or not type(optimizer).step.__module__.startswith(_WITHOUT_MASTERS):
        return []
    some = next((f" (such as {plain_name(name)})" for name, p in model.named_parameters() if p is low[0]), "")
    return [
        f"{len(low)} trainable parameters are held in {str(low[0].dtype).removeprefix('torch.')}{some}, and "
        f"{type(optimizer).__name__} keeps no float32 copy of them: an update smaller than about half the "
        "distance to the next number is rounded away, and most weights never move at a small learning rate. "
        "Call model.float() before sharding, and compute in bf16 by MixedPrecisionPolicy(param_dtype="
        "torch.bfloat16); in FSDP1 by MixedPrecision."
    ]


def check_gradient_sync(model: nn.Module, units: list[Unit]) -> list[str]:
    """Find units whose gradients stay on their rank in the next backward."""
    off, alone = [], []
    for unit in units:
        module = unit.modules[0]
        if not isinstance(module, FSDP1):
            off += [] if all(map(fsdp2_syncs, unit.parts)) else [unit.name]
            continue
        off += [] if fsdp1_syncs(module) else [unit.name]
        replicas = fsdp1_replicas(module)
        if replicas is not None and replicas.size() > 1 and dist.get_world_size(module.process_group) == 1:
            alone.append(unit.name)
    for name, module in model.named_modules():
        if isinstance(module, DistributedDataParallel) and not module.require_backward_grad_sync:
            off.append(plain_name(name) or ROOT)
    problems = []
    if off:
        problems.append(
            f"Gradient sync is off in {len(off)} units (such as {off[0]}): in the next backward each rank "
            "keeps its own gradients. That is right for all micro-batches of a step but the last. Before the "
            "last one call model.set_requires_gradient_sync(True), which also sets set_requires_all_reduce; "
            "with FSDP1 and DDP, leave model.no_sync()."
        )
    if alone:  # https://github.com/volcengine/verl/issues/7493
        problems.append(
            f"HYBRID_SHARD over groups of one rank in {len(alone)} FSDP1 units (such as {alone[0]}): FSDP1 "
            "makes it NO_SHARD within that group, so gradients are averaged with no other rank and each rank "
            "trains a model of its own. Put at least two ranks into a shard group, or use "
            "DistributedDataParallel, or fully_shard, which averages over such a mesh."
        )
    return problems


def check_copies(model: nn.Module) -> list[str]:
    """Compare buffers, and parameters that several ranks hold, if all ranks share the model."""
    if not has_peers() or len(_ranks_of(model)) < dist.get_world_size():
        return []
    ddp = [module for module in model.modules() if isinstance(module, DistributedDataParallel)]
    parameters = {name: copy for name, copy in parameter_copies(model).items() if copy.groups}
    # DDP gives all ranks the first one's buffers at the next forward.
    buffers = {} if any(module.broadcast_buffers for module in ddp) else buffer_copies(model)
    if not (parameters or buffers):
        return []
    try:
        ranks = agree(
            "check_sharding",
            dict,
            error=_NotComparedError,
            topic="sharding",
            wait_s=_WAIT_S,
            collective_s=_HASH_S,
        )
        with ranks.guard(), torch.inference_mode(False):  # in which a DTensor cannot be detached
            differ = differing({**parameters, **buffers}, ranks)
    except _NotComparedError as error:
        return [f"Buffers and copies of parameters were not compared between the ranks. {error}"]
    loose = {name for name, copy in parameters.items() if copy.place == WHOLE and not ddp}
    kinds = {_REPLICAS: parameters.keys() - loose, _LOOSE: loose, _BUFFERS: buffers.keys()}
    found = {kind: {name: differ[name] for name in differ if name in names} for kind, names in kinds.items()}
    return [
        f"{kind} differ between ranks: {in_words(some)}. {_CURES[kind]}"
        for kind, some in found.items()
        if some
    ]


def _ranks_of(model: nn.Module) -> set[int]:
    """The ranks that share the model; none while FSDP2 has all of it gathered."""
    meshes = {param.device_mesh for param in model.parameters() if isinstance(param, DTensor)}
    wrapped = [module for module in model.modules() if isinstance(module, FSDP1 | DistributedDataParallel)]
    groups = {module.process_group for module in wrapped}
    groups |= {fsdp1_replicas(module) for module in wrapped if isinstance(module, FSDP1)} - {None}
    found = {rank for mesh in meshes for rank in mesh.mesh.flatten().tolist()}
    return found.union(*map(dist.get_process_group_ranks, groups))
