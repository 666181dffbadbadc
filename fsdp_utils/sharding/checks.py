"""Check how a model was wrapped, and how it is about to be trained."""

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import Optimizer

from fsdp_utils.distributed.agreement import agree, has_peers
from fsdp_utils.sharding.blocks import class_of, separate, transformer_blocks
from fsdp_utils.sharding.copies import broadcasts_buffers, copies_of, differing, parameter_copies
from fsdp_utils.sharding.names import plain_name, some_names, unwrapped
from fsdp_utils.sharding.units import ROOT, Unit, find_units, parameter_sizes, within
from fsdp_utils.sharding.wrapping import UNEVEN, padding
from fsdp_utils.torch_internals.fsdp import fsdp1_replicas, fsdp1_syncs, fsdp2_syncs, fsdp2_whole

_SMALL = 0.1  # a block of which the root gathers a larger share is no unit
_HALF = 0.5  # a unit that gathers a larger share of the parameters undoes most of what sharding saves
_FEW_BYTES = 2**20  # less padding than this on each rank is not reported
_LOW = (torch.bfloat16, torch.float16)
# Optimizers whose step() is defined here update the parameter itself, without a float32 copy of it.
_WITHOUT_MASTERS = ("torch.optim.", "fsdp_utils.")
_WAIT_S = 5.0  # for the other ranks; it may have been called on one rank only
_HASH_S = 600.0  # that another rank may take longer to hash its copies

_Sizes = dict[Unit | None, dict[str, int]]  # of parameter_sizes


def check_sharding(model: nn.Module, optimizer: Optimizer | None = None) -> list[str]:
    """Find mistakes in how a model was wrapped, and say how to mend them.

    Changes nothing. Call it on every rank: where all share the model, buffers and replicated parameters are
    compared between them. A rank that no other one joins within five seconds says so in the result.

    Args:
        model: after FSDP1, FSDP2 or DDP was applied.
        optimizer: the one that trains it. Without it, nothing is said about bf16 and fp16 parameters.

    Returns:
        A sentence or two for each problem and what to do about it; empty when nothing is wrong. Tied weights
        are known of transformers models only.

    Example::

        shard(model)
        optimizer = torch.optim.AdamW(model.parameters())
        print(check_sharding(model, optimizer))  # []
    """
    units = find_units(model, also_empty=True)
    sizes = parameter_sizes(model, units)
    if not units and not any(isinstance(one, DDP) for one in model.modules()):
        return ["The model is not sharded: it has no FSDP unit. Call shard(model), or fully_shard."]
    return [
        *(_units(model, units, sizes) if units else ()),
        *_ties(model, sizes),
        *_rows(model),
        *_optimizer(model, units, params(optimizer)),
        *_master_weights(model, optimizer),
        *_gradient_sync(model, units),
        *_copies(model),
    ]


def _units(model: nn.Module, units: list[Unit], by_unit: _Sizes) -> Iterator[str]:
    """Find the first mistake in the choice of units; further ones would follow from it."""
    root, loose = units[0], by_unit[None]
    around = "Wrap the whole model in FSDP." if root.fsdp1 else "Call fully_shard(model) after its parts."
    if loose:
        yield (
            f"{len(loose)} parameters are in no unit (such as {next(iter(loose))}): they are not sharded and "
            f"their gradients are not averaged over the ranks. {around}"
        )
        return
    if root.name != ROOT and not all(unit.name.startswith(f"{root.name}.") for unit in units[1:]):
        container, _, number = root.name.rpartition(".")
        if number.isdigit() and {unit.name.rpartition(".")[0] for unit in units} == {container}:
            yield f"{len(units)} units, such as {root.name}, lie in no other one and stay gathered. {around}"
        return  # several sharded models side by side have no common root
    blocks: dict[str, nn.Module] = {}
    with suppress(ValueError):
        blocks = transformer_blocks(model)
    can_be_units = separate(model, blocks.values())
    blocks = {name: block for name, block in blocks.items() if block in can_be_units}
    kinds = " and ".join(sorted({class_of(unwrapped(one)).__name__ for one in blocks.values()})) or "part"
    cure = f"Call fully_shard on each {kinds} before the model, or shard(model) instead."
    if root.fsdp1:
        cure = "Pass auto_wrap_policy=ModuleWrapPolicy(transformer_block_classes(model)) to FSDP."
    sizes = {name: size for some in by_unit.values() for name, size in some.items()}
    of_root = by_unit[root]
    in_root = [name for name in blocks if _share(within(name, of_root), within(name, sizes)) > _SMALL]
    if in_root and len(units) > 1:
        yield (
            f"{len(in_root)} of {len(blocks)} blocks ({kinds}) are not units, such as {in_root[0]}: they are "
            f"gathered with the root and stay gathered. {cure}"
        )
        return
    for unit in units:
        own = by_unit[unit]
        held = [name for name in blocks if within(name, own)]
        if (unit is root or len(held) > 1) and (share := _share(own, sizes)) > _HALF:
            yield (
                f"{share:.0%} of the parameters are in one unit, {unit.name}, so that each rank holds them "
                f"and their gradients whole at once; the largest is {max(own, key=own.__getitem__)}. "
                + (cure if held else "Make its module a unit too, before the root.")
            )
            return


def _share(part: dict[str, int], whole: dict[str, int]) -> float:
    return sum(part.values()) / max(1, sum(whole.values()))


def _ties(model: nn.Module, by_unit: _Sizes) -> Iterator[str]:
    """Find weights that transformers ties, but which are two parameters, and neither was replaced."""
    found = {name: (size, unit) for unit, own in by_unit.items() for name, size in own.items()}
    pairs = {
        tuple(sorted((plain_name(prefix, target), plain_name(prefix, source))))
        for prefix, module in model.named_modules()
        for target, source in getattr(module, "all_tied_weights_keys", {}).items()
    }
    for a, b in sorted((a, b) for a, b in pairs if {a, b} <= found.keys() and found[a][0] == found[b][0]):
        one, other = found[a][1], found[b][1]
        are, cure = "two parameters", "After to_empty call model.tie_weights(), and wrap the model then."
        if one and other and one is not other:
            are = f"in two units, {one.name} and {other.name}"
            cure += " Leave both to the root's unit, or make them one unit (FSDP2: fully_shard([a, b]))."
        yield f"{a} and {b} are tied but {are}: each would train on its own. {cure}"


def _rows(model: nn.Module) -> Iterator[str]:
    """Find parameters, such as experts, that are cut between fewer rows than the ranks can share evenly."""
    added: dict[str, float] = {}  # bytes of padding on each rank
    share = 0.0
    for name, p in model.named_parameters():
        if isinstance(p, DTensor) and p.dim() and p.placements[-1].is_shard() and p.numel():
            ranks = p.device_mesh.size(p.device_mesh.ndim - 1)
            share += p.nbytes / ranks
            if p.placements[-1].is_shard(0) and padding(p.shape, ranks) > UNEVEN * p.numel():
                added[plain_name(name)] = padding(p.shape, ranks) * p.itemsize / ranks
    if sum(added.values()) > max(_FEW_BYTES, UNEVEN * share):
        yield (
            f"{len(added)} parameters, such as {max(added, key=added.__getitem__)}, are cut between rows "
            "that the ranks cannot share evenly: with padding, each rank holds "
            f"{sum(added.values()) / share:.0%} more than its share of the model. Call shard(model), which "
            "cuts them along another dimension that the ranks divide; where there is none, shard over fewer "
            'ranks (strategy "hybrid").'
        )


def _optimizer(model: nn.Module, units: list[Unit], given: list[Any]) -> Iterator[str]:
    """Find an optimizer of other parameters than the sharded ones."""
    held = [p for unit in units if not unit.fsdp1 for part in unit.parts for p in part.fsdp_params]
    whole = set(map(fsdp2_whole, held))
    own = {p.sharded_param for p in held} | (set(model.parameters()) - whole)
    # Other DTensors are of another sharded model, which the optimizer may train too.
    strangers = {p for p in set(given) - own if p in whole or not isinstance(p, DTensor)}
    if units and strangers and any(p.requires_grad for p in own.difference(given)):
        yield (
            f"The optimizer holds {len(strangers)} parameters that are not the sharded model's, so its "
            "steps do not change the model. Build it from model.parameters() after sharding, before the "
            "first forward (or call model.reshard() before)."
        )


def _master_weights(model: nn.Module, optimizer: Optimizer | None) -> Iterator[str]:
    """Find trainable parameters in bf16 or fp16 under an optimizer that is known to keep no masters."""
    while isinstance(inner := getattr(optimizer, "optimizer", None), Optimizer):
        optimizer = inner  # inside of Accelerate's
    # Those of the optimizer: between forward and backward the model may hold gathered copies in bf16.
    low = [p for p in params(optimizer) if p.requires_grad and p.dtype in _LOW]
    if optimizer and low and type(optimizer).step.__module__.startswith(_WITHOUT_MASTERS):
        names = [plain_name(name) for name, p in model.named_parameters() if p is low[0]]
        yield (
            f"{len(low)} trainable parameters are held in {str(low[0].dtype).removeprefix('torch.')}"
            f"{f' (such as {names[0]})' if names else ''}, and {type(optimizer).__name__} keeps no float32 "
            "copy of them: at a small learning rate most updates are rounded away. Call model.float() before "
            "sharding, and compute in bf16 by MixedPrecisionPolicy (FSDP1: MixedPrecision)."
        )


def params(optimizer: Optimizer | None) -> list[Any]:
    """Return the parameters of all groups."""
    return [p for group in optimizer.param_groups for p in group["params"]] if optimizer else []


def _gradient_sync(model: nn.Module, units: list[Unit]) -> Iterator[str]:
    """Find units whose gradients stay on their rank in the next backward."""
    off = [unit.name for unit in units if not unit.fsdp1 and not all(map(fsdp2_syncs, unit.parts))]
    for name, one in model.named_modules():
        syncs = one.require_backward_grad_sync if isinstance(one, DDP) else True
        if not syncs or (isinstance(one, FSDP1) and not fsdp1_syncs(one)):
            off.append(plain_name(name) or ROOT)
    if off:
        yield (
            f"Gradient sync is off in {len(off)} units (such as {off[0]}): in the next backward each rank "
            "keeps its own gradients. Before a step's last micro-batch call "
            "model.set_requires_gradient_sync(True); with FSDP1 and DDP, leave model.no_sync()."
        )


def _copies(model: nn.Module) -> Iterator[str]:
    """Compare buffers, and parameters that several ranks hold, where all ranks share the model."""
    if not has_peers() or not _is_of_all_ranks(model):
        return
    parameters = {name: copy for name, copy in parameter_copies(model).items() if copy.replicated}
    tensors = () if broadcasts_buffers(model) else model.named_buffers()
    buffers = copies_of((plain_name(name), buffer) for name, buffer in tensors)
    if not (parameters or buffers):
        return
    waits = {"wait_s": _WAIT_S, "collective_s": _HASH_S}
    try:
        ranks = agree("check_sharding", dict, error=RuntimeError, topic="sharding", **waits)
        with ranks.guard(), torch.inference_mode(False):  # in which a DTensor cannot be detached
            differ = differing({**parameters, **buffers}, ranks)
    except RuntimeError as error:
        yield f"Buffers and copies of parameters were not compared between the ranks. {error}"
        return
    if some := [said for name, said in differ.items() if name in parameters]:
        yield (
            f"Replicas of a parameter differ between ranks: {some_names(some, '; ')}. Build the model with "
            "one seed on all ranks; if they were the same once, look for a step that only some ranks take, "
            "gradient sync that is off, and what FSDP does not average: ignored parameters, and FSDP1's "
            "HYBRID_SHARD over groups of one rank."
        )
    if some := [said for name, said in differ.items() if name in buffers]:
        yield (
            f"Buffers differ between ranks: {some_names(some, '; ')}. Broadcast them from rank 0 before "
            "evaluating and saving, as FSDP does not (batch norm's statistics: use nn.SyncBatchNorm)."
        )


def _is_of_all_ranks(model: nn.Module) -> bool:
    """Say whether all ranks share the model; False while FSDP2 has all of it gathered."""
    sizes = [p.device_mesh.size() for p in model.parameters() if isinstance(p, DTensor)]
    for one in model.modules():
        if isinstance(one, FSDP1 | DDP):
            replicas = fsdp1_replicas(one)
            sizes.append(dist.get_world_size(one.process_group) * (replicas.size() if replicas else 1))
    return max(sizes, default=0) == dist.get_world_size()
