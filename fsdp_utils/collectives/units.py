"""Which units does a model have?"""

from __future__ import annotations

import math
import sys
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
        return sum(map(math.prod, handle.flat_param._shapes)) * handle._orig_param_dtype.itemsize

    @property
    def device(self) -> str:
        """Where its shards are at rest now."""
        if not self.fsdp1:
            return ", ".join(sorted(map(str, {parameter.device for parameter in self._sharded()})))
        (handle,) = self.parts
        # Where it cannot be moved in place (to "meta"), nn.Module.to registers another one.
        registered = handle._fully_sharded_module._parameters.get("_flat_param", handle.flat_param)
        return "cpu" if handle._offload_params else str(registered.device)

    def _sharded(self) -> list[Any]:
        return [parameter.sharded_param for part in self.parts for parameter in part.fsdp_params]


def distributed_parts(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """Those under FSDP1, FSDP2 or DDP."""
    return [m for m in modules if isinstance(m, FSDP | FSDPModule | DistributedDataParallel)]


def is_compiled(modules: Iterable[nn.Module]) -> bool:
    """Is torch.compile at work, in them or around them?"""
    frames = getattr(sys.modules.get("torch._dynamo.convert_frame"), "FRAME_COUNTER", 0)
    return frames > 0 or any(
        module._compiled_call_impl is not None or "_orig_mod" in module._modules for module in modules
    )


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
            if (handle := module._handle) is not None:
                units.append(Unit(plain_name(name) or ROOT, (module,), (handle,), fsdp1=True))
        elif isinstance(module, FSDPModule):
            parts = tuple(part for part in _groups(module) if id(part) not in seen)
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
            for child_name, child in module._modules.items():
                if child is not None:
                    walk(child, f"{name}.{child_name}" if name else child_name)

    walk(model, "")
    return names


def fsdp2_state(module: Any) -> Any:
    """What FSDP2 keeps of a module under fully_shard."""
    return module._get_fsdp_state()


def _groups(module: FSDPModule) -> list[Any]:
    state = fsdp2_state(module)
    if hasattr(state, "_fsdp_param_groups"):  # several from torch 2.12 on
        return list(state._fsdp_param_groups or [])
    group = state._fsdp_param_group
    return [] if group is None else [group]


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
