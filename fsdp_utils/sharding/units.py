"""The FSDP units of a model: what FSDP1 or FSDP2 gathers, computes and frees in one piece."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1

from fsdp_utils.sharding.names import plain_name
from fsdp_utils.torch_internals.fsdp import (
    Flat,
    fsdp1_dtypes,
    fsdp1_handle,
    fsdp2_groups,
    fsdp2_state,
)

ROOT = "(root)"  # the name of the model itself; no submodule can be called so


@dataclass(frozen=True, eq=False)
class Unit:
    """One FSDP unit.

    Args:
        name: of its module, without wrappers; ROOT for the model itself.
        modules: those that share it: one, or the list that fully_shard was given.
        parts: what in torch holds its parameters: FSDP2's parameter groups, or FSDP1's handle; empty where
            all parameters are in units within.
        fsdp1: which of the two.
    """

    name: str
    modules: tuple[nn.Module, ...]
    parts: tuple[Any, ...]
    fsdp1: bool

    @property
    def nbytes(self) -> int:
        """Bytes of its full parameters, without padding."""
        if not self.fsdp1:
            return sum(p.sharded_param.nbytes for part in self.parts for p in part.fsdp_params)
        return sum(
            sum(map(math.prod, Flat(handle.flat_param).shapes)) * fsdp1_dtypes(handle)[0].itemsize
            for handle in self.parts
        )


def find_units(model: nn.Module, *, also_empty: bool = False) -> list[Unit]:
    """The model's FSDP units, outer before inner.

    Args:
        model: sharded or not.
        also_empty: with those that hold no parameters themselves, such as a root around blocks.
    """
    names = {module: name for name, module in model.named_modules()}
    units = []
    seen: set[int] = set()  # FSDP2's states: modules that were sharded together, as a list, have one
    for module, name in names.items():
        if isinstance(module, FSDP1):
            handle = fsdp1_handle(module)
            unit = Unit(plain_name(name) or ROOT, (module,), () if handle is None else (handle,), fsdp1=True)
        elif isinstance(module, FSDPModule) and id(state := fsdp2_state(module)) not in seen:
            seen.add(id(state))
            parts = tuple(fsdp2_groups(module))
            modules: Any = parts[0].modules if parts else (module,)
            together = (plain_name(names.get(one, "")) or ROOT for one in modules)
            unit = Unit(", ".join(together), modules, parts, fsdp1=False)
        else:
            continue
        if unit.parts or also_empty:
            units.append(unit)
    return units


def parameter_sizes(model: nn.Module, units: list[Unit]) -> dict[Unit | None, dict[str, int]]:
    """Elements of each full parameter, by unit and plain name; those that are in no unit under None.

    A tied parameter has several names and counts once.

    Args:
        model: sharded or not.
        units: all of them, `find_units(model, also_empty=True)`.
    """
    of_module = {module: unit for unit in units for module in unit.modules}
    sizes: dict[Unit | None, dict[str, int]] = {unit: {} for unit in (*units, None)}
    unit_at: dict[str, Unit | None] = {}
    seen: set[nn.Parameter] = set()
    for name, module in model.named_modules():  # outer before inner
        unit = unit_at[name] = of_module.get(module) or unit_at.get(name.rpartition(".")[0])
        if isinstance(module, FSDP1) and unit is not None:
            for flat in (Flat(handle.flat_param) for handle in unit.parts):
                found = zip(flat.names, flat.numels, strict=True)
                sizes[unit] |= {plain_name(name, inside): numel for inside, numel in found}
        elif unit is None or not unit.fsdp1:
            for own, parameter in module.named_parameters(recurse=False):
                if parameter not in seen:
                    seen.add(parameter)
                    sizes[unit][plain_name(name, own)] = parameter.numel()
    return sizes


def within(module: str, sizes: dict[str, int]) -> dict[str, int]:
    """The parameters of the module of that name."""
    return {name: size for name, size in sizes.items() if name.startswith(f"{module}.")}


def parents(units: list[Unit]) -> set[str]:
    """Names of the units, and of the model, that hold other units."""
    owner = {name: unit.name for unit in units for name in unit.name.split(", ")}
    found = {ROOT} if any(unit.name != ROOT for unit in units) else set()
    for inner, name in owner.items():
        outer = inner
        while outer := outer.rpartition(".")[0]:
            if owner.get(outer, name) != name:
                found.add(owner[outer])
    return found
