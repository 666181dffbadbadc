"""check_sharding: find mistakes in how a model was wrapped."""

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fsdp_utils.sharding.blocks import SMALL, by_shared_parameters, outermost, transformer_block_classes
from fsdp_utils.sharding.names import plain_name
from fsdp_utils.sharding.placements import unevenly_cut
from fsdp_utils.sharding.training_checks import (
    check_copies,
    check_gradient_sync,
    check_master_weights,
    check_optimizer,
)
from fsdp_utils.sharding.units import ROOT, Unit, find_units, parameter_sizes, within

# A unit that gathers more than this share of the parameters at once undoes most of what sharding saves.
HALF = 0.5


def check_sharding(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> list[str]:
    """Find mistakes in how a model was wrapped, and say how to mend them.

    Changes nothing. Call it on every rank: where all ranks share the model, buffers, and parameters of which
    several ranks hold a copy, are compared between them. A rank that no other one joins within five seconds
    says so in the result, and that nothing was compared.

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
    replicated = any(isinstance(module, DistributedDataParallel) for module in model.modules())
    if not units and not replicated:
        return [
            "The model is not sharded: no module in it is an FSDP unit. Call shard(model), or fully_shard."
        ]
    problems = []
    if units:
        sizes, loose = parameter_sizes(model, units)
        fsdp2 = not units[0].fsdp1
        problems += _check_units(model, units, sizes, loose, fsdp2) + _check_ties(model, sizes, fsdp2)
        problems += _check_placements(model)
    if optimizer is not None:
        problems += check_optimizer(model, optimizer, units) + check_master_weights(model, optimizer)
    return problems + check_gradient_sync(model, units) + check_copies(model)


def _check_units(
    model: nn.Module,
    units: list[Unit],
    sizes_of: dict[Unit, dict[str, int]],
    loose: dict[str, int],
    fsdp2: bool,
) -> list[str]:
    """The first mistake in the choice of units; further ones would follow from it."""
    if loose:
        what_to_do = "Call fully_shard(model) after its parts." if fsdp2 else "Wrap the whole model in FSDP."
        return [
            f"{len(loose)} parameters are in no unit (such as {next(iter(loose))}): they are not sharded and "
            f"their gradients are not averaged over the ranks. {what_to_do}"
        ]
    try:
        classes = transformer_block_classes(model)
    except ValueError:
        classes = set()
    names = " and ".join(sorted(cls.__name__ for cls in classes)) or "part"
    what_to_do = (
        f"Call fully_shard on each {names} before the model, or shard(model) instead."
        if fsdp2
        else "Pass auto_wrap_policy=ModuleWrapPolicy(transformer_block_classes(model)) to FSDP."
    )
    if len(units) == 1:
        return [
            "Only the root is a unit: the whole model is gathered at once, so in backward each rank holds "
            "all parameters and all gradients whole. Sharding saves memory only on the optimizer's state, "
            f"and between the steps. {what_to_do}"
        ]
    root = units[0]
    if root.name != ROOT and not all(unit.name.startswith(f"{root.name}.") for unit in units[1:]):
        return []  # several sharded models side by side have no common root
    of_root = sizes_of[root]
    sizes = {name: size for some in sizes_of.values() for name, size in some.items()}
    blocks = dict(outermost(model, tuple(classes))) if classes else {}
    in_root = [name for name in blocks if _share(within(name, of_root), within(name, sizes)) > SMALL]
    if in_root:
        return [
            f"{len(in_root)} of {len(blocks)} blocks ({names}) are not units, such as {in_root[0]}: they are "
            "gathered with the root and stay gathered. If a class was named for wrapping, it was not theirs. "
            f"{what_to_do}"
        ]
    of_blocks = {name: size for block in blocks for name, size in within(block, sizes).items()}
    for unit in units[1:]:
        own = sizes_of[unit]
        held = [block for block in blocks if within(block, own)]
        share = _share({name: size for name, size in own.items() if name in of_blocks}, of_blocks)
        # Blocks that share a parameter have to be in one unit.
        if share > HALF and len(by_shared_parameters([blocks[block] for block in held])) > 1:
            return [
                f"{len(held)} of {len(blocks)} blocks ({names}) are in one unit ({unit.name}), which gathers "
                f"{share:.0%} of all blocks' parameters at once. {what_to_do}"
            ]
    if (share := _share(of_root, sizes)) > HALF:
        largest = max(of_root, key=of_root.__getitem__)
        return [
            f"{share:.0%} of the parameters are in the root's unit, which stays gathered through forward and "
            f"backward; the largest is {largest}. Make its module a unit too, before the root."
        ]
    return []


def _share(part: dict[str, int], whole: dict[str, int]) -> float:
    return sum(part.values()) / max(1, sum(whole.values()))


def _check_ties(model: nn.Module, sizes_of: dict[Unit, dict[str, int]], fsdp2: bool) -> list[str]:
    unit_of = {name: unit.name for unit, sizes in sizes_of.items() for name in sizes}
    pairs = {
        tuple(sorted((plain_name(prefix, target), plain_name(prefix, source))))
        for prefix, module in model.named_modules()
        # transformers: which names are one parameter. Under one unit only one of them is left.
        for target, source in getattr(module, "all_tied_weights_keys", {}).items()
    }
    what_to_do = "fully_shard([a, b])" if fsdp2 else "FSDP around a module that holds both"
    return [
        f"{a} and {b} are tied but in two units, {unit_of[a]} and {unit_of[b]}, so they are no longer one "
        "parameter: each would train on its own (from 2.13 on, torch refuses to run such an FSDP2 model). "
        f"Leave both modules to the root's unit, or make them one unit: {what_to_do}."
        for a, b in sorted(pairs)
        if a in unit_of and b in unit_of
    ]


def _check_placements(model: nn.Module) -> list[str]:
    names, more = unevenly_cut(model)
    return [
        f"{len(names)} parameters, such as {name}, are cut between their few rows, which the ranks cannot "
        f"share evenly: with padding, each rank holds {more:.0%} more than its share of the model. Call "
        "shard(model), or give fully_shard a shard_placement_fn that returns Shard(dim), with a dimension "
        "that the ranks divide."
        for name in names[:1]
    ]
