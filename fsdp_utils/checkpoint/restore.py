"""Restore the model and the optimizer from loaded tensors, under any wrapper."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import set_model_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor import empty as empty_dtensor
from torch.optim import Optimizer

from fsdp_utils.checkpoint.errors import CheckpointMismatchError
from fsdp_utils.checkpoint.state import (
    MODEL,
    OptimizerPlan,
    Snapshot,
    clean_name,
    has_fsdp1,
    parameter_names,
    quiet,
)
from fsdp_utils.checkpoint.user_state import Places
from fsdp_utils.sharding.local_part import local
from fsdp_utils.sharding.names import plain_name
from fsdp_utils.torch_internals.fsdp import Flat, fsdp1_flat
from fsdp_utils.torch_internals.names import FLAT_PARAM


def optimizer_buffers(
    wanted: Snapshot,
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    saved: Sequence[OptimizerPlan],
    found: Mapping[str, tuple[torch.dtype, torch.Size]],
) -> dict[str, Tensor]:
    """Allocate tensors for the optimizers' state, in the checkpoint's dtypes, sharded as the parameters are.

    Where the optimizer has such a tensor already it is that one: a second copy of the state takes memory, and
    getting it from the system takes longer than filling it. Else it is an empty one, as it is for an
    optimizer with a state_dict() of its own, whose `state` may hold something else under the same name.
    """
    as_they_are = [one for one in optimizers if type(one).state_dict is Optimizer.state_dict]
    states = [] if has_fsdp1(model) else [one.state for one in as_they_are]
    own = {
        (names[0], what): value
        for param, names in parameter_names(model).items()
        for state in states
        for what, value in (state[param].items() if param in state else ())
        if isinstance(value, Tensor) and value.dim()  # one number may be shared by several parameters
    }
    taken = {_address(tensor) for tensor in wanted.tensors.values()}
    buffers = {}
    for key, path in (item for plan in saved for item in plan.paths.items()):
        dtype, shape = found[key]
        param = wanted.tensors.get(MODEL + wanted.first_name(path[0]))
        there = own.get(path)
        if (
            param is not None
            and there is not None
            and (there.dtype, there.shape, there.device) == (dtype, shape, param.device)
            and _sharding(there) == _sharding(param)
            and _address(there) not in taken
        ):
            taken.add(_address(there))
            buffers[key] = there
        elif param is not None and param.shape == shape:
            buffers[key] = torch.empty_like(param, dtype=dtype)
        else:
            buffers[key] = torch.empty(shape, dtype=dtype)
    return buffers


def state_buffers(
    places: Places, found: Mapping[str, tuple[torch.dtype, torch.Size]], model: nn.Module
) -> dict[str, Tensor]:
    """Allocate tensors for the sharded tensors in the state.

    One that has the name and the shape of a parameter, as an average of the weights has, is sharded as the
    parameter is. Others are sharded over the model's mesh as they were over their own; or they are full,
    where no parameter of the model is a DTensor, or the model's mesh has fewer dimensions than were sharded.
    """
    params = {
        name: param
        for param, names in parameter_names(model).items()
        for name in names
        if isinstance(param, DTensor)
    }
    mesh = next((param.device_mesh for param in params.values()), None)
    buffers = {}
    for key, (path, dims) in places.items():
        dtype, shape = found[key]
        name = plain_name(str(path[-1])) if path else ""
        param = params.get(name, params.get(name.removeprefix("module.")))  # as AveragedModel's are named
        while dims and dims[0] is None:  # replicated, as by hybrid sharding
            dims = dims[1:]
        if param is not None and param.shape == shape:
            buffers[key] = torch.empty_like(param, dtype=dtype, requires_grad=False)
        elif mesh is None or len(dims) > mesh.ndim:
            buffers[key] = torch.empty(shape, dtype=dtype)
        else:
            placements: list[Placement] = [Replicate()] * (mesh.ndim - len(dims))
            placements += [Replicate() if dim is None else Shard(dim) for dim in dims]
            buffers[key] = empty_dtensor(shape, dtype=dtype, device_mesh=mesh, placements=placements)
    return buffers


def restore_model(model: nn.Module, loaded: Snapshot) -> None:
    """Restore the model from `loaded`, a Snapshot of it whose tensors were filled."""
    own = {_address(tensor) for tensor in (*model.parameters(), *model.buffers())}
    copies = {
        key.removeprefix(MODEL): tensor
        for key, tensor in loaded.tensors.items()
        if key.startswith(MODEL) and _address(tensor) not in own
    }
    if not copies and not loaded.extra:
        return  # the tensors of the Snapshot are the model's own
    state = {
        **{
            key.removeprefix(MODEL): tensor for key, tensor in loaded.tensors.items() if key.startswith(MODEL)
        },
        **loaded.originals,
        **loaded.extra,
    }
    state.update({alias: state[name] for alias, name in loaded.tied.items()})
    with quiet():
        set_model_state_dict(
            model, {loaded.raw_names.get(name, name): value for name, value in state.items()}
        )


def restore_optimizers(
    wanted: Snapshot,
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    saved: Sequence[OptimizerPlan],
    tensors: Mapping[str, Tensor],
    receive: Callable[[str], Tensor],
) -> None:
    """Restore each optimizer from its saved plan.

    Args:
        tensors: by flat name, filled; from optimizer_buffers().
        receive: for a model in FSDP1: gives the full tensor of a flat name, on every rank.
    """
    units, names = units_of(model), parameter_names(model)
    for optimizer, plan in zip(optimizers, saved, strict=True):
        state = (
            fsdp1_optimizer_state(model, units, plan, receive)
            if units
            else state_by_parameter(wanted, names, plan, tensors)
        )
        restore_optimizer(wanted, names, optimizer, plan, state)


def state_by_parameter(
    wanted: Snapshot,
    names: Mapping[nn.Parameter, list[str]],
    saved: OptimizerPlan,
    tensors: Mapping[str, Tensor],
) -> dict[Tensor, dict[str, Any]]:
    """Group the optimizer's tensors, sharded as the parameters are, by parameter."""
    params = {name: param for param, some in names.items() for name in some}
    return {params[wanted.first_name(name)]: state for name, state in saved.whole(tensors)["state"].items()}


def restore_optimizer(
    wanted: Snapshot,
    names: Mapping[nn.Parameter, list[str]],
    optimizer: Optimizer,
    saved: OptimizerPlan,
    state: Mapping[Tensor, Mapping[str, Any]],
) -> None:
    """Restore the optimizer's state and hyperparameters by its load_state_dict().

    torch's set_optimizer_state_dict() would do that too, but takes a step where there is no state yet, mixes
    the groups up where one of them is empty, and refuses an FSDP1 unit inside of activation checkpointing.

    Args:
        names: from parameter_names().
        state: by parameter, in the dtypes that the state is to have.
    """
    params = [param for group in optimizer.param_groups for param in group["params"]]
    numbers = {param: number for number, param in enumerate(params)}
    groups = [
        {**settings, "params": [numbers[param] for param in group["params"]]}
        for group, settings in zip(
            optimizer.param_groups, _settings(wanted, names, optimizer, saved), strict=True
        )
    ]
    optimizer.load_state_dict(
        {"state": {numbers[param]: dict(own) for param, own in state.items()}, "param_groups": groups}
    )
    # Optimizer.load_state_dict converts a state to the dtype of its parameter; it is to be what was saved.
    for param, own in state.items():
        for what, value in own.items():
            there = optimizer.state[param].get(what)
            if isinstance(value, Tensor) and isinstance(there, Tensor) and there.dtype != value.dtype:
                optimizer.state[param][what] = value.to(param.device)


def _settings(
    wanted: Snapshot,
    names: Mapping[nn.Parameter, list[str]],
    optimizer: Optimizer,
    saved: OptimizerPlan,
) -> Iterator[dict[str, Any]]:
    """The saved settings of each parameter group, in the order of the optimizer's groups."""
    by_name = {wanted.first_name(name): group for group in saved.groups for name in group["params"]}
    empty = (group for group in saved.groups if not group["params"])
    for group in optimizer.param_groups:
        found = by_name[names[group["params"][0]][0]] if group["params"] else next(empty)
        # The names of the parameters are this optimizer's own, in its order and of its wrapper.
        yield {key: value for key, value in found.items() if key not in ("params", "param_names")}


def _sharding(tensor: Tensor) -> object:
    return (tensor.device_mesh, tensor.placements) if isinstance(tensor, DTensor) else None


def _address(tensor: Tensor) -> int:
    return local(tensor).data_ptr()


# ---- FSDP1's flat parameters ------------------------------------------------------------------------


class Unit(NamedTuple):
    """An FSDP1 module and the parameters that it, and not a unit inside of it, shards."""

    module: FSDP1
    names: list[str]  # in the model, in the order of the flat parameter


class _Piece(NamedTuple):
    """This rank's part of one parameter, in what the optimizer has: the flat parameter or a view of it."""

    param: nn.Parameter
    start: int  # in param
    offset: int  # in the whole parameter
    numel: int
    whole: int  # elements of the whole parameter


def _pieces(unit: Unit) -> dict[str, _Piece]:
    """This rank's parts of the unit's parameters, by name."""
    flat = fsdp1_flat(unit.module)
    if flat is None:
        return {}
    kept, pieces = Flat(flat), {}
    for index, (name, info) in enumerate(zip(unit.names, kept.shards, strict=True)):
        if info.in_shard:
            # An optimizer has either the flat parameter or, with use_orig_params, its views.
            param, start = (kept.params[index], 0) if kept.params else (flat, info.offset_in_shard)
            part = info.intra_param_start_idx, info.numel_in_shard
            pieces[name] = _Piece(param, start, *part, kept.numels[index])
    return pieces


def units_of(model: nn.Module) -> list[Unit]:
    """List all FSDP1 modules, outermost first."""
    units = []
    for path, module in model.named_modules():
        if isinstance(module, FSDP1):
            flat = fsdp1_flat(module)
            inner = Flat(flat).names if flat is not None else ()
            names = [clean_name(model, ".".join(filter(None, (path, name)))) for name in inner]
            units.append(Unit(module, names))
    return units


@torch.no_grad()
def fsdp1_optimizer_state(
    model: nn.Module,
    units: list[Unit],
    saved: OptimizerPlan,
    receive: Callable[[str], Tensor],
) -> dict[Tensor, dict[str, Any]]:
    """Cut the optimizer's state to this rank's parts of FSDP1's flat parameters.

    Args:
        receive: gives the whole tensor of a flat name, on every rank.
    """
    pieces = {name: piece for unit in units for name, piece in _pieces(unit).items()}
    inside = {name for unit in units for name in unit.names}
    for raw_name, param in model.named_parameters():
        name = clean_name(model, raw_name)
        if FLAT_PARAM not in raw_name and name not in inside:
            pieces[name] = _Piece(param, 0, 0, param.numel(), param.numel())  # that no unit shards
    state: dict[Tensor, Any] = {}
    for key, (name, what) in saved.paths.items():
        value = receive(key)  # on every rank, also where nothing of it is kept
        if (piece := pieces.get(name)) is None:
            continue
        of_param = state.setdefault(piece.param, {})
        of_its_own = value.numel() != piece.whole  # as Adafactor's, which has less than the parameter
        if of_its_own and value.dim() and piece.param.numel() != piece.whole:
            raise CheckpointMismatchError(
                f"optimizer state {what!r} of {name}: expected {piece.whole} elements, one for each of the "
                f"parameter, which FSDP1 can cut, found {list(value.shape)}. Load it into FSDP2, DDP "
                "or no wrapper"
            )
        if of_its_own or value.dim() == 0:
            of_param[what] = value.clone()  # a scalar as with FSDP1 itself: one for the whole unit
            continue
        if what not in of_param:
            of_param[what] = torch.zeros(piece.param.shape, dtype=value.dtype, device=piece.param.device)
        part = value.reshape(-1)[piece.offset : piece.offset + piece.numel]
        of_param[what].view(-1)[piece.start : piece.start + piece.numel] = part
    for (name, what), value in saved.plain.items():
        if name in pieces:
            state.setdefault(pieces[name].param, {})[what] = value
    return state
