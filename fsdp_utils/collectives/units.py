"""Which units does a model have?"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.nn.parallel import DistributedDataParallel

from fsdp_utils.collectives.trace import ROOT
from fsdp_utils.sharding.names import plain_name
from fsdp_utils.torch_internals.fsdp import (
    Flat,
    fsdp1_dtypes,
    fsdp1_handle,
    fsdp1_offloads,
    fsdp2_groups,
    registered_flat,
)
from fsdp_utils.torch_internals.runtime import has_compiled, is_under_compile, own_children


@dataclass(frozen=True)
class Unit:
    """What FSDP gathers, computes and frees in one piece.

    Args:
        name: Of its module; ROOT for the model itself.
        modules: Those that share it: one, or the list that fully_shard was given.
        parts: What in torch holds its parameters: FSDP2's parameter groups, or FSDP1's handle.
        fsdp1: Which of the two.
    """

    name: str
    modules: tuple[nn.Module, ...]
    parts: tuple[Any, ...]
    fsdp1: bool

    @property
    def nbytes(self) -> int:
        """Of its whole parameters, without padding."""
        if not self.fsdp1:
            return sum(parameter.nbytes for parameter in self._sharded())
        (handle,) = self.parts
        return sum(map(math.prod, Flat(handle.flat_param).shapes)) * fsdp1_dtypes(handle)[0].itemsize

    @property
    def device(self) -> str:
        """Where its shards are at rest now."""
        if not self.fsdp1:
            return ", ".join(sorted(map(str, {parameter.device for parameter in self._sharded()})))
        (handle,) = self.parts
        return "cpu" if fsdp1_offloads(handle) else str(registered_flat(handle).device)

    def _sharded(self) -> list[Any]:
        return [parameter.sharded_param for part in self.parts for parameter in part.fsdp_params]


def distributed_parts(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """Those under FSDP1, FSDP2 or DDP."""
    return [m for m in modules if isinstance(m, FSDP | FSDPModule | DistributedDataParallel)]


def is_compiled(modules: Iterable[nn.Module]) -> bool:
    """Is torch.compile at work, in them or around them?"""
    return has_compiled() or any(map(is_under_compile, modules))


def has_ddp(modules: Iterable[nn.Module]) -> bool:
    """Is any of them under DDP?"""
    return any(isinstance(module, DistributedDataParallel) for module in modules)


def find_units(model: nn.Module, names: dict[nn.Module, str] | None = None) -> list[Unit]:
    """The model's FSDP units that hold parameters, the root's first if it holds any.

    `names` are those of its modules, where they are known already.
    """
    names = names_of_modules(model) if names is None else names
    units = []
    seen: set[int] = set()
    for module, name in names.items():
        if isinstance(module, FSDP):
            if (handle := fsdp1_handle(module)) is not None:
                units.append(Unit(plain_name(name) or ROOT, (module,), (handle,), fsdp1=True))
        elif isinstance(module, FSDPModule):
            parts = tuple(part for part in fsdp2_groups(module) if id(part) not in seen)
            seen.update(id(part) for part in parts)
            if parts:
                modules = parts[0].modules
                called = (plain_name(names.get(module, "")) or ROOT for module in modules)
                units.append(Unit(", ".join(called), modules, parts, fsdp1=False))
    return units


def names_of_modules(model: nn.Module) -> dict[nn.Module, str]:
    """All modules and their names, as model.named_modules() gives them, which takes three times as long."""
    names: dict[nn.Module, str] = {}

    def walk(module: nn.Module, name: str) -> None:
        if module not in names:
            names[module] = name
            for child_name, child in own_children(module).items():
                if child is not None:
                    walk(child, f"{name}.{child_name}" if name else child_name)

    walk(model, "")
    return names


def compute_device(model: nn.Module, units: list[Unit]) -> torch.device:
    """Where the model computes, wherever its shards are at rest."""
    return units[0].parts[0].device if units else next(model.parameters()).device


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
