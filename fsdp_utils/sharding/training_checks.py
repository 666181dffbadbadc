"""The part of check_sharding about training: do small updates arrive, and are gradients averaged?"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1
from torch.nn.parallel import DistributedDataParallel

from fsdp_utils.sharding.names import module_names, plain_name
from fsdp_utils.sharding.units import ROOT, Unit
from fsdp_utils.torch_internals.fsdp import fsdp1_replicas, fsdp1_syncs, fsdp2_syncs

_LOW = (torch.bfloat16, torch.float16)
# Optimizers whose step() is defined here update the parameter itself, without a float32 copy of it.
_WITHOUT_MASTERS = ("torch.optim.", "fsdp_utils.")


def check_master_weights(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    """Find trainable parameters held in bf16 or fp16 under an optimizer that is known to keep no masters."""
    while isinstance(inner := getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        optimizer = inner  # inside of Accelerate's
    if not type(optimizer).step.__module__.startswith(_WITHOUT_MASTERS):
        return []
    # Those of the optimizer: between forward and backward the model may hold gathered copies in bf16.
    low = [
        p for group in optimizer.param_groups for p in group["params"] if p.requires_grad and p.dtype in _LOW
    ]
    if not low:
        return []
    dtypes = " and ".join(sorted({str(p.dtype).removeprefix("torch.") for p in low}))
    some = next((f" (such as {plain_name(name)})" for name, p in model.named_parameters() if p is low[0]), "")
    return [
        f"{len(low)} trainable parameters are held in {dtypes}{some}, and "
        f"{type(optimizer).__name__} keeps no float32 copy of them: an update smaller than about half the "
        "distance to the next number is rounded away, and most weights never move at a small learning rate. "
        "Call model.float() before sharding, and compute in bf16 by MixedPrecisionPolicy(param_dtype="
        "torch.bfloat16); in FSDP1 by MixedPrecision."
    ]


def _syncs(unit: Unit) -> bool:
    if isinstance(module := unit.modules[0], FSDP1):
        return fsdp1_syncs(module)
    return all(fsdp2_syncs(part) for part in unit.parts)


def check_gradient_sync(model: nn.Module, units: list[Unit]) -> list[str]:
    """Find units whose gradients stay on their rank in the next backward."""
    names = module_names(model)
    off = [unit.name for unit in units if not _syncs(unit)]
    off += [
        plain_name(name) or ROOT
        for module, name in names.items()
        if isinstance(module, DistributedDataParallel) and not module.require_backward_grad_sync
    ]
    problems = []
    if off:
        problems.append(
            f"Gradient sync is off in {len(off)} units (such as {off[0]}): in the next backward each rank "
            "keeps its own gradients. That is right for all micro-batches of a step but the last. Before the "
            "last one call model.set_requires_gradient_sync(True), which also sets set_requires_all_reduce; "
            "with FSDP1 and DDP, leave model.no_sync()."
        )
    alone = [
        plain_name(name) or ROOT
        for module, name in names.items()
        if isinstance(module, FSDP1)
        and (replicas := fsdp1_replicas(module)) is not None
        and replicas.size() > 1
        and dist.get_world_size(module.process_group) == 1
    ]
    if alone:
        problems.append(
            f"HYBRID_SHARD over groups of one rank in {len(alone)} FSDP1 units (such as {alone[0]}): FSDP1 "
            "makes it NO_SHARD within that group, so gradients are averaged with no other rank and each rank "
            "trains a model of its own. Put at least two ranks into a shard group, or use "
            "DistributedDataParallel, or fully_shard, which averages over such a mesh."
        )
    return problems
