"""Into which FSDP units was a model wrapped?"""

from typing import Any, NamedTuple

from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

from fsdp_utils.sharding.names import plain_name
from fsdp_utils.torch_internals.fsdp import Flat, fsdp1_handle, fsdp2_state


class Unit(NamedTuple):
    name: str  # in the model, as it would be without wrappers
    module: nn.Module
    sizes: dict[str, int]  # elements of each parameter that it gathers, whole, by name


def units_of(model: nn.Module) -> tuple[list[Unit], dict[str, int]]:
    """All FSDP units, outer before inner, and the sizes of the parameters that are in none."""
    units: dict[Any, Unit] = {}
    loose: dict[str, int] = {}
    seen: set[nn.Parameter] = set()  # a tied parameter has several names and counts once

    def walk(module: nn.Module, name: str, unit: Unit | None) -> None:
        if isinstance(module, FullyShardedDataParallel):
            unit = units.setdefault(module, Unit(name, module, {}))
            if (handle := fsdp1_handle(module)) is not None:
                flat = Flat(handle.flat_param)
                unit.sizes.update(
                    {plain_name(name, fqn): n for fqn, n in zip(flat.names, flat.numels, strict=True)}
                )
        elif isinstance(module, FSDPModule):
            # Modules that were sharded together, as a list, have one state and are one unit.
            unit = units.setdefault(fsdp2_state(module), Unit(name, module, {}))
        if unit is None or isinstance(unit.module, FSDPModule):
            for parameter_name, parameter in module.named_parameters(recurse=False):
                if parameter in seen:
                    continue
                seen.add(parameter)
                sizes = loose if unit is None else unit.sizes
                sizes[plain_name(name, parameter_name)] = parameter.numel()
        for child_name, child in module.named_children():
            walk(child, plain_name(name, child_name), unit)

    walk(model, "", None)
    return list(units.values()), loose


def sizes_of(units: list[Unit]) -> dict[str, int]:
    return {name: size for unit in units for name, size in unit.sizes.items()}


def within(module: str, sizes: dict[str, int]) -> dict[str, int]:
    """The parameters of the module of that name."""
    return {name: size for name, size in sizes.items() if name.startswith(f"{module}.")}
