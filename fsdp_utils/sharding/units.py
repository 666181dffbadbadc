"""The FSDP units of a model: what FSDP1 or FSDP2 gathers, computes and frees in one piece."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1

from fsdp_utils.sharding.names import plain_name
from fsdp_utils.torch_internals.fsdp import Flat, fsdp1_dtypes, fsdp1_handle, fsdp2_groups, fsdp2_state

ROOT = "(root)"  # the name of the model itself; no submodule can be called so


@dataclass(frozen=True, eq=False)
class Unit:
    """One FSDP unit."""

    name: str  # of its module, without wrappers; ROOT for the model itself
    modules: tuple[nn.Module, ...]  # one, or the list that fully_shard was given
    parts: tuple[Any, ...]  # FSDP2's parameter groups, or FSDP1's handle; empty if all is in units within
    fsdp1: bool

    @property
    def nbytes(self) -> int:
        """Bytes of its full parameters, without padding."""
        if not self.fsdp1:
            return sum(p.sharded_param.nbytes for part in self.parts for p in part.fsdp_params)
        return sum(sum(Flat(one.flat_param).numels) * fsdp1_dtypes(one)[0].itemsize for one in self.parts)


def find_units(model: nn.Module, *, also_empty: bool = False) -> list[Unit]:
    """Find the model's FSDP units, outer before inner; also_empty: with those that hold no parameters."""
    names = {module: plain_name(name) or ROOT for name, module in model.named_modules()}
    units: dict[int, Unit] = {}  # by FSDP2's state, which modules share that were sharded as a list
    for module in names:
        if isinstance(module, FSDP1):
            handle = fsdp1_handle(module)
            units[id(module)] = Unit(names[module], (module,), (handle,) if handle else (), fsdp1=True)
        elif isinstance(module, FSDPModule):
            parts = tuple(fsdp2_groups(module))
            modules: Any = parts[0].modules if parts else (module,)
            name = ", ".join(names.get(one, ROOT) for one in modules)
            units.setdefault(id(fsdp2_state(module)), Unit(name, modules, parts, fsdp1=False))
    return [unit for unit in units.values() if unit.parts or also_empty]


def parameter_sizes(model: nn.Module, units: list[Unit]) -> dict[Unit | None, dict[str, int]]:
    """Elements of each full parameter, once if tied, by unit (also empty; None: no unit) and plain name."""
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
    unit_of = {module: unit for unit in units for module in unit.modules}
    inner = {module: {unit_of.get(one, unit) for one in module.modules()} for module, unit in unit_of.items()}
    found = {unit.name for module, unit in unit_of.items() if inner[module] != {unit}}
    return found | {ROOT} if any(unit.name != ROOT for unit in units) else found
