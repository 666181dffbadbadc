"""Which modules become FSDP units, and was this model wrapped well?

A unit is what FSDP gathers, computes and frees in one piece. For a transformer the right unit is the
block: gathered one by one, only a block or two need whole parameters at a time.
"""

from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    FSDPModule,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor

__all__ = ["check_sharding", "shard", "transformer_block_classes", "wrap_policy"]

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
# Wrappers that stand where a module stood: FSDP1, activation checkpointing, torch.compile.
_WRAPPED_IN = ("_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod")
# A repeated class with less than this share of the parameters in blocks is not worth units of its own.
_SMALL = 0.1


def transformer_block_classes(model: nn.Module) -> set[type[nn.Module]]:
    """Which classes are this model's transformer blocks, to be FSDP units?

    Looks at what stands in a ModuleList, ModuleDict or Sequential. Where a transformers model names its
    blocks (`_no_split_modules`), these are taken; elsewhere the outermost repeated classes, if they hold
    at least a tenth of all that is repeated. Plain layers (nn.Linear in a Sequential) are not blocks.

    Args:
        model: any module, sharded or not, on any device, "meta" too.

    Returns:
        The classes, as FSDP1's ModuleWrapPolicy takes them: one for a decoder or an encoder, two or more
        where they differ.

    Raises:
        ValueError: nothing is repeated.
    """
    units, loose = _units(model)
    parameters = _sizes(units) | loose
    sizes: Counter[type[nn.Module]] = Counter()
    named = set()
    for name, block, is_named in _candidates(model):
        sizes[_class_of(block)] += sum(_within(name, parameters).values())
        if is_named:
            named.add(_class_of(block))
    total = sum(sizes.values())
    classes = named | {cls for cls, size in sizes.items() if size > 0 and size >= _SMALL * total}
    if not classes:
        raise ValueError(
            f"{_class_of(model).__name__}: found no transformer blocks. Expected a class that stands at "
            "least twice in a ModuleList, ModuleDict or Sequential and holds parameters. Give the repeated "
            "part of the model a class of its own, or call fully_shard on its parts yourself."
        )
    return classes


def wrap_policy(model: nn.Module) -> ModuleWrapPolicy:
    """How does FSDP1 make each block a unit? By `FSDP(model, auto_wrap_policy=wrap_policy(model))`.

    Raises:
        ValueError: the model has no transformer blocks.
    """
    return ModuleWrapPolicy(transformer_block_classes(model))


def shard(
    model: nn.Module,
    *,
    mesh: DeviceMesh | None = None,
    strategy: str = "full",
    mp_policy: MixedPrecisionPolicy | None = None,
    offload_policy: OffloadPolicy | None = None,
) -> nn.Module:
    """Make each transformer block an FSDP2 unit, then the model: the loop that one would write by hand.

    Build the optimizer after this call. Blocks that share a parameter become one unit; a block that shares
    one with the rest of the model (tied weights) stays in the root's unit.

    Args:
        model: changed in place.
        mesh: 1-D, or for "hybrid" 2-D with named dimensions (replicate, shard). None is 1-D over all ranks.
        strategy: "full": parameters are freed after a block's forward and gathered again in backward
            (FULL_SHARD, ZeRO-3). "grad_op": they stay until backward (SHARD_GRAD_OP, ZeRO-2). "hybrid":
            as "full" within the mesh's second dimension, replicated over the first (HYBRID_SHARD).
        mp_policy: mixed precision, for every unit.
        offload_policy: CPUOffloadPolicy(...), for every unit.

    Returns:
        The model.

    Raises:
        ValueError: the strategy is unknown or does not go with the mesh; the model has no transformer blocks.
        RuntimeError: there is no process group.
    """
    if strategy not in ("full", "grad_op", "hybrid"):
        raise ValueError(f'shard: expected strategy "full", "grad_op" or "hybrid", found {strategy!r}')
    if not dist.is_initialized():
        raise RuntimeError(
            "shard: there is no process group. Start the program with torchrun and call "
            "torch.distributed.init_process_group(), or use run_on_ranks."
        )
    if (found := 1 if mesh is None else mesh.ndim) != (expected := 2 if strategy == "hybrid" else 1):
        raise ValueError(
            f'shard: strategy "{strategy}" expects a {expected}-D mesh, found a {found}-D one. For "hybrid": '
            'init_device_mesh(device_type, (hosts, ranks_per_host), mesh_dim_names=("replicate", "shard")).'
        )
    options: dict[str, Any] = {"mesh": _all_ranks() if mesh is None else mesh}
    if mp_policy is not None:
        options["mp_policy"] = mp_policy
    if offload_policy is not None:
        options["offload_policy"] = offload_policy

    blocks = [block for _, block in _outermost(model, tuple(transformer_block_classes(model)))]
    for unit in _units_of(model, blocks):
        fully_shard(unit, reshard_after_forward=strategy != "grad_op", **options)
    if strategy == "grad_op":
        options["reshard_after_forward"] = False  # else torch's default, which is the same for a root
    fully_shard(model, **options)
    return model


def check_sharding(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> list[str]:
    """What is wrong with how this model was wrapped?

    Only looks: no collective, no change, so it may be called on one rank.

    Args:
        model: after FSDP1 or FSDP2 was applied.
        optimizer: the one that is to train it.

    Returns:
        A sentence or two for each problem and what to do about it; empty when nothing is wrong. Only
        transformers models tell which weights are tied.
    """
    units, loose = _units(model)
    if not units:
        return [
            "The model is not sharded: no module in it is an FSDP unit. Call shard(model), or fully_shard."
        ]
    fsdp2 = isinstance(units[0].module, FSDPModule)
    return [
        *_check_units(model, units, loose, fsdp2),
        *_check_ties(model, units, fsdp2),
        *_check_mixed_requires_grad(units),
        *(_check_optimizer(model, optimizer, fsdp2) if optimizer is not None else []),
    ]


# ---- finding blocks --------------------------------------------------------------------------------


def _candidates(model: nn.Module) -> Iterator[tuple[str, nn.Module, bool]]:
    """What may be a block, outermost, by name, and whether the model itself names its class as one."""
    names: set[str] = set()
    for module in model.modules():
        # transformers: None, a list or a set of class names, of which some may not occur in this model,
        # and some are no blocks (embeddings). A composite model leaves it to its parts.
        names.update(getattr(module, "_no_split_modules", None) or ())
    in_containers = [_unwrapped(child) for parent in model.modules() for child in _contained(parent)]
    counts = Counter(map(_class_of, in_containers))
    named = {child for child in in_containers if _class_of(child).__name__ in names}

    def walk(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module, bool]]:
        contained = [_unwrapped(child) for child in _contained(module)]
        for child_name, wrapped in module.named_children():
            name, child = _join(prefix, child_name), _unwrapped(wrapped)
            if child in named:
                yield name, child, True
            elif child in contained and counts[_class_of(child)] > 1 and named.isdisjoint(child.modules()):
                yield name, child, False
            else:
                yield from walk(child, name)

    return walk(_unwrapped(model), "")


def _contained(parent: nn.Module) -> list[nn.Module]:
    """The children that may be blocks for where they stand and what they are."""
    if not isinstance(parent, _CONTAINERS):
        return []
    return [child for child in parent.children() if not _is_plain(_unwrapped(child))]


def _is_plain(module: nn.Module) -> bool:
    cls = _class_of(module)
    is_leaf_of_torch = cls.__module__.startswith("torch.nn.") and not list(module.children())
    return cls in _CONTAINERS or is_leaf_of_torch


def _unwrapped(module: nn.Module) -> nn.Module:
    for name in _WRAPPED_IN:
        if name in module._modules:
            return _unwrapped(module._modules[name])  # pyright: ignore[reportArgumentType]
    return module


def _class_of(module: nn.Module) -> type[nn.Module]:
    """The class as it was written: fully_shard puts one of its own before it."""
    line = type(module).__mro__
    return line[line.index(FSDPModule) + 1] if FSDPModule in line else line[0]


def _outermost(
    model: nn.Module, classes: tuple[type[nn.Module], ...], prefix: str = ""
) -> Iterator[tuple[str, nn.Module]]:
    """The blocks by name, as they stand in the model: a checkpoint wrapper around one belongs to it."""
    for name, child in model.named_children():
        if isinstance(_unwrapped(child), classes):
            yield _join(prefix, name), child
        else:
            yield from _outermost(child, classes, _join(prefix, name))


# ---- sharding ----------------------------------------------------------------------------------------


def _all_ranks() -> DeviceMesh:
    # By the backend, as gloo ranks may run on a machine that has a GPU.
    accelerator = None if dist.get_backend() == "gloo" else torch.accelerator.current_accelerator()
    return init_device_mesh("cpu" if accelerator is None else accelerator.type, (dist.get_world_size(),))


def _units_of(model: nn.Module, blocks: list[nn.Module]) -> list[Any]:
    """The blocks, grouped so that no two units share a parameter, nor one with what stays in the root."""

    def outside(module: nn.Module) -> Iterator[nn.Parameter]:
        yield from module.parameters(recurse=False)
        for child in module.children():
            if child not in blocks:
                yield from outside(child)

    in_root = set(outside(model))
    groups: list[tuple[list[nn.Module], set[nn.Parameter]]] = []
    for block in blocks:
        modules, parameters = [block], set(block.parameters())
        for group in [group for group in groups if not group[1].isdisjoint(parameters)]:
            groups.remove(group)
            modules, parameters = group[0] + modules, group[1] | parameters
        groups.append((modules, parameters))
    units = [modules for modules, parameters in groups if parameters.isdisjoint(in_root)]
    return [modules[0] if len(modules) == 1 else modules for modules in units]


# ---- checking ----------------------------------------------------------------------------------------


class _Unit(NamedTuple):
    name: str  # in the model, as it would be without wrappers
    module: nn.Module
    sizes: dict[str, int]  # elements of each parameter that it gathers, whole, by name


def _units(model: nn.Module) -> tuple[list[_Unit], dict[str, int]]:
    """All FSDP units, outer before inner, and the sizes of the parameters that are in none."""
    units: dict[Any, _Unit] = {}
    loose: dict[str, int] = {}
    seen: set[nn.Parameter] = set()  # a tied parameter has several names and counts once

    def walk(module: nn.Module, name: str, unit: _Unit | None) -> None:
        if isinstance(module, FullyShardedDataParallel):
            unit = units.setdefault(module, _Unit(name, module, {}))
            if module._handle is not None:  # None: all its parameters are in units within
                flat = module._handle.flat_param
                unit.sizes.update(
                    {_join(name, fqn): n for fqn, n in zip(flat._fqns, flat._numels, strict=True)}
                )
        elif isinstance(module, FSDPModule):
            # Modules that were sharded together, as a list, have one state and are one unit.
            unit = units.setdefault(module._get_fsdp_state(), _Unit(name, module, {}))
        if unit is None or isinstance(unit.module, FSDPModule):
            for parameter_name, parameter in module.named_parameters(recurse=False):
                if parameter in seen:
                    continue
                seen.add(parameter)
                sizes = loose if unit is None else unit.sizes
                sizes[_join(name, parameter_name)] = parameter.numel()
        for child_name, child in module.named_children():
            walk(child, _join(name, child_name), unit)

    walk(model, "", None)
    return list(units.values()), loose


def _sizes(units: list[_Unit]) -> dict[str, int]:
    return {name: size for unit in units for name, size in unit.sizes.items()}


def _within(module: str, sizes: dict[str, int]) -> dict[str, int]:
    """The parameters of the module of that name."""
    return {name: size for name, size in sizes.items() if name.startswith(f"{module}.")}


def _join(*names: str) -> str:
    parts = ".".join(names).split(".")
    return ".".join(part for part in parts if part and part not in _WRAPPED_IN)


def _check_units(model: nn.Module, units: list[_Unit], loose: dict[str, int], fsdp2: bool) -> list[str]:
    """The first thing that is wrong with what is in which unit; the rest would follow from it."""
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
        else f"Pass auto_wrap_policy={'wrap_policy(model)' if classes else 'a policy'} to FSDP."
    )
    if len(units) == 1:
        return [
            "Only the root is a unit: the whole model is gathered at once, which saves no memory while it "
            f"computes. {what_to_do}"
        ]
    root = units[0]
    if root.name and not all(unit.name.startswith(f"{root.name}.") for unit in units[1:]):
        return []  # several models side by side: no root to speak of
    sizes = _sizes(units)
    blocks = [name for name, _ in _outermost(model, tuple(classes))] if classes else []
    in_root = [name for name in blocks if _share(_within(name, root.sizes), _within(name, sizes)) > _SMALL]
    if in_root:
        return [
            f"{len(in_root)} of {len(blocks)} blocks ({names}) are not units, such as {in_root[0]}: they are "
            "gathered with the root and stay gathered. If a class was named for wrapping, it was not theirs. "
            f"{what_to_do}"
        ]
    if (share := _share(root.sizes, sizes)) > 0.5:
        largest = max(root.sizes, key=root.sizes.__getitem__)
        return [
            f"{share:.0%} of the parameters are in the root's unit, which stays gathered through forward and "
            f"backward; the largest is {largest}. Make its module a unit too, before the root."
        ]
    return []


def _share(part: dict[str, int], whole: dict[str, int]) -> float:
    return sum(part.values()) / max(1, sum(whole.values()))


def _check_ties(model: nn.Module, units: list[_Unit], fsdp2: bool) -> list[str]:
    unit_of = {name: unit.name or "the root" for unit in units for name in unit.sizes}
    pairs = {
        tuple(sorted((_join(prefix, target), _join(prefix, source))))
        for prefix, module in model.named_modules()
        # transformers: which names are one parameter. Under one unit only one of them is left.
        for target, source in getattr(module, "all_tied_weights_keys", {}).items()
    }
    what_to_do = "fully_shard([a, b])" if fsdp2 else "FSDP around a module that holds both"
    return [
        f"{a} and {b} are tied but in two units ({unit_of[a]} and {unit_of[b]}), so they are no longer one "
        "parameter: each would train on its own (from 2.13 on, torch refuses to run such an FSDP2 model). "
        f"Leave both modules to the root's unit, or make them one unit: {what_to_do}."
        for a, b in sorted(pairs)
        if a in unit_of and b in unit_of
    ]


def _check_mixed_requires_grad(units: list[_Unit]) -> list[str]:
    messages = []
    for unit in units:
        handle = getattr(unit.module, "_handle", None)  # of FSDP1; FSDP2 minds each parameter by itself
        parameters = (handle.flat_param._params or []) if handle is not None else []
        frozen = sum(not parameter.requires_grad for parameter in parameters)
        if 0 < frozen < len(parameters):
            messages.append(
                f"The unit {unit.name or 'of the root'} mixes {frozen} frozen parameters with "
                f"{len(parameters) - frozen} trained ones: FSDP1 holds and sends gradients for all of them. "
                "Wrap the frozen modules in units of their own, or use FSDP2."
            )
    return messages


def _check_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, fsdp2: bool) -> list[str]:
    of_model = set(model.parameters())
    given = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    # Between forward and backward FSDP2 has the whole parameters in the model; what the optimizer should
    # hold are the sharded ones, which are DTensors.
    strangers = [p for p in given - of_model if not (fsdp2 and isinstance(p, DTensor))]
    if not strangers or all(p in given for p in of_model if p.requires_grad):
        return []
    return [
        f"The optimizer holds {len(strangers)} parameters that are not in the model, as they are from before "
        "sharding: its steps change nothing. Build the optimizer after sharding, from model.parameters()."
    ]
