"""FSDP1 keeps the parameters of a unit as one flat tensor. Where in it is what?

Used where a state is spread from rank 0: FSDP1's own ways of doing that need a second copy of the shard, and
on CPUs some give back wrong values or freed memory (torch 2.13).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1
from torch.optim import Optimizer

from fsdp_utils.checkpoint.names import clean, quiet, tied_names
from fsdp_utils.checkpoint.state import MODEL, OptimizerPlan, Snapshot
from fsdp_utils.torch_internals.fsdp import Flat, fsdp1_flat
from fsdp_utils.torch_internals.names import FLAT_PARAM
from fsdp_utils.torch_internals.runtime import unsaved_buffers


@dataclass
class Unit:
    """An FSDP1 module and the parameters that it, and not a unit inside of it, shards."""

    module: FSDP1
    names: dict[str, str]  # name in the model -> name inside of the module
    shapes: list[torch.Size]
    dtype: torch.dtype | None


@dataclass
class _Piece:
    """Where this rank keeps its part of one parameter."""

    param: (
        nn.Parameter
    )  # that the optimizer has: the flat one, or with use_orig_params the parameter's own view
    # (offset in param, first and number of elements in the whole parameter); None when nothing is sharded
    where: tuple[int, int, int] | None
    here: bool = True

    def put(self, whole: Tensor, flat: Tensor) -> None:
        assert self.where is not None
        offset, start, count = self.where
        flat[offset : offset + count] = whole.reshape(-1)[start : start + count]


def _pieces(unit: Unit, own: set[int]) -> dict[str, _Piece]:
    """By name, for the parameters that the optimizer has (it has either the flat one or the views)."""
    flat = fsdp1_flat(unit.module)
    kept = Flat(flat)
    pieces = {}
    for index, name in enumerate(unit.names):
        assert flat is not None
        info = kept.shards[index]
        if id(flat) in own:
            param, offset = flat, info.offset_in_shard
        else:
            param, offset = kept.params[index], 0  # its view, with use_orig_params
        where = (offset, info.intra_param_start_idx, info.numel_in_shard) if info.in_shard else None
        if param is not flat and param.shape == unit.shapes[index]:
            where = None  # on one rank, and with NO_SHARD, the view is the whole parameter
        pieces[name] = _Piece(param, where, here=info.in_shard)
    return pieces


def units_of(model: nn.Module) -> list[Unit]:
    """All FSDP1 modules, outermost first."""
    units = []
    for path, module in model.named_modules():
        if isinstance(module, FSDP1):
            flat = fsdp1_flat(module)
            inner = Flat(flat).names if flat is not None else ()
            names = {clean(model, ".".join(filter(None, (path, name)))): name for name in inner}
            shapes = list(Flat(flat).shapes) if flat is not None else []
            units.append(Unit(module, names, shapes, flat.dtype if flat is not None else None))
    return units


def outside_of_units(model: nn.Module, units: list[Unit]) -> dict[str, Tensor]:
    """The parameters and buffers of an FSDP1 model that no unit shards, by name."""
    inside = {name for unit in units for name in unit.names} | tied_names(model).keys()
    tensors: dict[str, Tensor] = {
        clean(model, name): param for name, param in model.named_parameters() if FLAT_PARAM not in name
    }
    for path, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in unsaved_buffers(module):
                tensors[clean(model, ".".join(filter(None, (path, name))))] = buffer
    return {name: tensor for name, tensor in tensors.items() if name not in inside}


def shapes(model: nn.Module, units: list[Unit]) -> Snapshot:
    """What an FSDP1 model wants, without gathering or copying anything: tensors of one element, expanded."""
    tensors = {MODEL + name: tensor for name, tensor in outside_of_units(model, units).items()}
    for unit in units:
        for name, shape in zip(unit.names, unit.shapes, strict=True):
            tensors[MODEL + name] = torch.empty((), dtype=unit.dtype).expand(shape)
    return Snapshot(tensors, tied=tied_names(model))


@torch.no_grad()
def fill_model(model: nn.Module, units: list[Unit], receive: Callable[[str], Tensor]) -> None:
    """Give the model its values, one unit unsharded at a time.

    Args:
        receive: gives the whole tensor of a flat name, on every rank.
    """
    for name, tensor in outside_of_units(model, units).items():
        tensor.copy_(receive(MODEL + name))
    for unit in units:
        with quiet(), FSDP1.summon_full_params(unit.module, recurse=False):
            for name, inner in unit.names.items():
                # `.module` would skip a wrapper for activation checkpointing, which is in the name
                param = unit.module.get_parameter(f"_fsdp_wrapped_module.{inner}")
                param.copy_(receive(MODEL + name))


@torch.no_grad()
def flat_state(
    model: nn.Module,
    units: list[Unit],
    optimizer: Optimizer,
    saved: OptimizerPlan,
    receive: Callable[[str], Tensor],
) -> dict[Tensor, dict[str, Any]]:
    """The optimizer's state by parameter: what belongs to this rank's piece of the flat parameters.

    Args:
        receive: gives the whole tensor of a flat name, on every rank.
    """
    own = {id(param) for group in optimizer.param_groups for param in group["params"]}
    pieces = {name: piece for unit in units for name, piece in _pieces(unit, own).items()}
    pieces |= {
        name: _Piece(param, None)
        for name, param in outside_of_units(model, units).items()
        if isinstance(param, nn.Parameter)
    }
    state: dict[Tensor, Any] = {}
    for key, (name, what) in saved.paths.items():
        value, piece = receive(key), pieces[name]
        if not piece.here:
            continue
        place = state.setdefault(piece.param, {})
        if value.dim() == 0 or piece.where is None:
            place[what] = value.clone()  # as with FSDP1 itself, one for the whole unit
            continue
        device = piece.param.device
        flat = place.setdefault(what, torch.zeros(piece.param.shape, dtype=value.dtype, device=device))
        piece.put(value, flat)
    for (name, what), value in saved.plain.items():
        if pieces[name].here:
            state.setdefault(pieces[name].param, {})[what] = value
    return state
