"""The way back: loaded tensors into the model and the optimizer."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import set_model_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from fsdp_utils.checkpoint.names import clean, has_fsdp1, parameter_names, quiet
from fsdp_utils.checkpoint.state import MODEL, OptimizerPlan, Snapshot


def optimizer_buffers(
    wanted: Snapshot,
    model: nn.Module,
    optimizer: Optimizer,
    saved: OptimizerPlan,
    found: Mapping[str, tuple[torch.dtype, torch.Size]],
) -> dict[str, Tensor]:
    """Tensors for the optimizer's state, in the checkpoint's dtypes, sharded as the parameters are.

    Where the optimizer has such a tensor already it is that one: a second copy of the state takes memory, and
    getting it from the system takes longer than filling it. Else it is an empty one, as it is for an
    optimizer with a state_dict() of its own, whose `state` may hold something else under the same name.
    """
    as_it_is = type(optimizer).state_dict is Optimizer.state_dict and not has_fsdp1(model)
    own = {
        (names[0], what): value
        for param, names in (parameter_names(model) if as_it_is else {}).items()
        for what, value in optimizer.state.get(param, {}).items()
        if isinstance(value, Tensor) and value.dim()  # one number may be shared by several parameters
    }
    taken = {_address(tensor) for tensor in wanted.tensors.values()}
    buffers = {}
    for key, path in saved.paths.items():
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


def put_model(model: nn.Module, loaded: Snapshot) -> None:
    """Take over what `loaded`, a Snapshot of this model, now holds."""
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
        set_model_state_dict(model, state)


def put_extra(model: nn.Module, extra: Mapping[str, Any]) -> None:
    """Give the modules what their get_extra_state() gave."""
    for path, module in model.named_modules():
        name = clean(model, f"{path}._extra_state".removeprefix("."))
        if name in extra and not isinstance(module, FSDP1 | DistributedDataParallel):
            module.set_extra_state(extra[name])


def state_by_parameter(
    wanted: Snapshot, model: nn.Module, saved: OptimizerPlan, tensors: Mapping[str, Tensor]
) -> dict[Tensor, dict[str, Any]]:
    """The optimizer's state by parameter, from its tensors by flat name, sharded as the parameters are."""
    params = {name: param for param, names in parameter_names(model).items() for name in names}
    return {params[wanted.first_name(name)]: state for name, state in saved.whole(tensors)["state"].items()}


def put_optimizer(
    wanted: Snapshot,
    model: nn.Module,
    optimizer: Optimizer,
    saved: OptimizerPlan,
    state: Mapping[Tensor, Mapping[str, Any]],
) -> None:
    """Give the optimizer the state and the hyperparameters that were saved, by its load_state_dict().

    torch's set_optimizer_state_dict() would do that too, but takes a step where there is no state yet, mixes
    the groups up where one of them is empty, and refuses an FSDP1 unit inside of activation checkpointing.

    Args:
        state: by parameter, in the dtypes that the state is to have.
    """
    params = [param for group in optimizer.param_groups for param in group["params"]]
    numbers = {param: number for number, param in enumerate(params)}
    groups = [
        {**settings, "params": [numbers[param] for param in group["params"]]}
        for group, settings in zip(
            optimizer.param_groups, _settings(wanted, model, optimizer, saved), strict=True
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
    wanted: Snapshot, model: nn.Module, optimizer: Optimizer, saved: OptimizerPlan
) -> Iterator[dict[str, Any]]:
    """What was saved of each group besides its parameters, in the order of the optimizer's groups."""
    names = parameter_names(model)
    by_name = {wanted.first_name(name): group for group in saved.groups for name in group["params"]}
    empty = (group for group in saved.groups if not group["params"])
    for group in optimizer.param_groups:
        found = by_name[names[group["params"][0]][0]] if group["params"] else next(empty)
        # The names of the parameters are this optimizer's own, in its order and of its wrapper.
        yield {key: value for key, value in found.items() if key not in ("params", "param_names")}


def _sharding(tensor: Tensor) -> object:
    return (tensor.device_mesh, tensor.placements) if isinstance(tensor, DTensor) else None


def _address(tensor: Tensor) -> int:
    """Where the local part of the tensor lies."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).data_ptr()
