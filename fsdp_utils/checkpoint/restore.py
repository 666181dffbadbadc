"""Check a checkpoint against a model and its optimizers before anything is changed; put the values back."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import set_model_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor import empty as empty_dtensor
from torch.optim import Optimizer

from fsdp_utils.checkpoint.codec import decode
from fsdp_utils.checkpoint.errors import CheckpointError
from fsdp_utils.checkpoint.state import (
    MODEL,
    Held,
    has_fsdp1,
    in_parts,
    optimizer_classes,
    parameter_names,
    quiet,
)
from fsdp_utils.checkpoint.tensor_files import Spec
from fsdp_utils.sharding.local_part import local
from fsdp_utils.sharding.names import plain_name
from fsdp_utils.torch_internals.fsdp import fsdp1_handle
from fsdp_utils.torch_internals.names import get_param_to_fqns

_SHOWN = 5  # problems in one error


class Matched(NamedTuple):
    """Which tensors of a model are stored, and which names only one of the two has."""

    stored: dict[str, list[str]]  # by name in the model, the names under which it is stored
    missing: list[str]  # in the model
    unexpected: list[str]  # in the store


def match_model(
    held: Held,
    found: Mapping[str, Spec],
    where: str,
    remedy: str,
    *,
    cast: bool = False,
    strict: bool = True,
    ignored: Collection[str] = (),
) -> Matched:
    """Match the tensors of a model with stored ones, and check that they are alike."""
    own, stored = held.of_model(), {}
    for name in found:
        if name not in ignored and held.first_name(name) in own:
            stored.setdefault(held.first_name(name), []).append(name)
    missing = [name for name in own if name not in stored]
    unexpected = [name for name in found if name in ignored or held.first_name(name) not in own]
    problems: dict[str, list[str]] = {}  # the names that have it, by problem
    alike = {name: {found[one]: one for one in reversed(names)} for name, names in stored.items()}
    for name, there, one in ((name, *pair) for name, specs in alike.items() for pair in specs.items()):
        shape, dtype = list(own[name].shape), own[name].dtype
        if list(there.shape) != shape:
            problem = f"expected shape {shape} (the model's), found {list(there.shape)}"
            problems.setdefault(problem, []).append(one)
        if there.dtype != dtype and not cast:
            problem = f"expected {dtype} (the model's), found {there.dtype}; cast=True converts them"
            problems.setdefault(problem, []).append(one)
    if strict or not stored:
        for problem, names in (
            (f"expected by the model, found nothing; {remedy}", missing),
            (f"expected by nothing in the model, found; {remedy}", unexpected),
        ):
            problems |= {problem: left} if (left := [name for name in names if name not in ignored]) else {}
    if problems:
        lines = [f"{_some(names)}: {problem}" for problem, names in problems.items()]
        more = [f"... and {len(lines) - _SHOWN} more"] * (len(lines) > _SHOWN)
        text = "\n  ".join([*lines[:_SHOWN], *more])
        raise CheckpointError(f"{where} is of another model:\n  {text}")
    return Matched(stored, missing, unexpected)


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


# ---- where to read to --------------------------------------------------------------------------------


class Targets(list[tuple[str, Tensor]]):
    """The tensors to fill, with their keys; codec.decode() has its methods allocate what it asks for."""

    def __init__(self, held: Held, specs: Mapping[str, Spec], dims: Mapping[str, list[int | None]]) -> None:
        self._specs, self._dims = specs, dims
        self._params = {name: one for name, one in held.of_model().items() if isinstance(one, DTensor)}
        self._taken = {_address(tensor) for tensor in held.tensors.values()}

    def full(self, key: str) -> Tensor:
        """Allocate a full tensor in CPU memory."""
        spec = self._specs[key]
        return self._add(key, torch.empty(spec.shape, dtype=spec.dtype, device="cpu"))

    def of_state(self, key: str) -> Tensor:
        """Allocate a tensor of the user's state.

        A DTensor that has the name and shape of a parameter, as an average of the weights has, is sharded as
        that is. Another one is sharded over the model's mesh along the dimensions that it was before, as many
        as the mesh has; or it is full, where the model has no mesh.
        """
        mesh = next((param.device_mesh for param in self._params.values()), None)
        if key not in self._dims or mesh is None:
            return self.full(key)
        spec, parts, dims = self._specs[key], key.split("."), self._dims[key]
        for start in range(1, len(parts)):  # the longest name first; AveragedModel's begin with "module."
            param = self._params.get(plain_name(*parts[start:]))
            if param is not None and tuple(param.shape) == spec.shape:
                return self._add(key, torch.empty_like(param, dtype=spec.dtype, requires_grad=False))
        if len(dims) != mesh.ndim:
            sharded = [dim for dim in dims if dim is not None][-mesh.ndim :]
            dims = [None] * (mesh.ndim - len(sharded)) + sharded
        placements: list[Placement] = [Replicate() if dim is None else Shard(dim) for dim in dims]
        new = empty_dtensor(spec.shape, dtype=spec.dtype, device_mesh=mesh, placements=placements)
        return self._add(key, new)

    def of_parameter(self, key: str, param: Tensor, own: Mapping[str, Any]) -> Tensor:
        """Find or allocate a tensor of an optimizer's state, sharded as its parameter is.

        Where the optimizer has such a tensor already it is that one: a second copy of the state takes memory,
        and getting it from the system takes longer than filling it.
        """
        spec, there = self._specs[key], own.get(key.rpartition(".")[2])
        if tuple(param.shape) != spec.shape:
            if key in self._dims and isinstance(param, DTensor):
                return self.of_state(key)
            device = param.device if spec.shape else "cpu"
            return self._add(key, torch.empty(spec.shape, dtype=spec.dtype, device=device))
        alike = (
            isinstance(there, Tensor)
            and there.dim()  # one number may be shared by several parameters
            and (there.dtype, there.shape, there.device) == (spec.dtype, param.shape, param.device)
            and _sharding(there) == _sharding(param)
            and _address(there) not in self._taken
        )
        if not alike:
            return self._add(key, torch.empty_like(param, dtype=spec.dtype, requires_grad=False))
        self._taken.add(_address(there))
        return self._add(key, there)

    def _add(self, key: str, tensor: Any) -> Tensor:
        self.append((key, tensor))
        return tensor


def _sharding(tensor: Tensor) -> object:
    return (tensor.device_mesh, tensor.placements) if isinstance(tensor, DTensor) else None


def _address(tensor: Any) -> int:
    return local(tensor).data_ptr()


# ---- optimizers --------------------------------------------------------------------------------------


class SavedOptimizers(NamedTuple):
    """The optimizers of a checkpoint."""

    settings: list[dict[str, Any]]  # each group's, in the order of the optimizers here
    state: dict[str, dict[str, Any]]  # by name of the parameter


def match_optimizers(
    held: Held,
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    plain: Mapping[str, Any],
    targets: Targets,
) -> SavedOptimizers:
    """Find what was saved of each group of parameters, by the names of the parameters, and check it."""
    if not optimizers:
        return SavedOptimizers([], {})
    names = parameter_names(model)
    here = [
        (
            optimizer_classes(one),
            sorted(held.first_name(name) for param in group["params"] for name in names[param]),
            number,
        )
        for number, one in enumerate(optimizers)
        for group in one.param_groups
    ]
    left = [decode(group, targets.full) for group in plain["groups"]]
    there = [sorted(map(held.first_name, group["params"])) for group in left]
    if sorted(params for _, params, _ in here) != sorted(there):
        own, saved = {name for _, some, _ in here for name in some}, {name for some in there for name in some}
        raise CheckpointError(
            f"expected optimizers with groups of {[len(params) for _, params, _ in here]} parameters, found "
            f"{[len(params) for params in there]} in the checkpoint; only here: {sorted(own - saved)[:3]}; "
            f"only in the checkpoint: {sorted(saved - own)[:3]}. Give the optimizers that were saved, in any "
            "order, or none if they are to start anew"
        )
    settings = []
    of = {tuple(params): group["of"] for params, group in zip(there, left, strict=True) if params}
    saved_as = {number: of[tuple(params)] for _, params, number in here if params}
    for classes, params, number in here:
        alike = [index for index, group in enumerate(there) if group == params]
        related = [index for index in alike if set(left[index]["classes"]) & set(classes)]
        if not related:
            raise CheckpointError(
                f"expected the state of {classes[0]}, found that of {left[alike[0]]['classes'][0]}, which "
                f"{classes[0]} cannot go on from. Load into that class, or without the optimizer if it is to "
                "start anew"
            )
        # Of groups without parameters, the first one that is left, of the same optimizer if there is one.
        related.sort(key=lambda index: left[index]["of"] != saved_as.get(number))
        settings.append(left.pop(related[0])["settings"])
        there.pop(related[0])
    held_by = {
        names[param][0]: one.state[param]
        for one in optimizers
        if type(one).state_dict is Optimizer.state_dict  # else it may hold something else under that name
        for param in names
        if param in one.state
    }
    fsdp1 = has_fsdp1(model)
    state: dict[str, dict[str, Any]] = {}
    for name, entries in plain["optimizer"].items():
        first = held.first_name(name)
        param, own = held.tensors[MODEL + first], {} if fsdp1 else held_by.get(first, {})
        state[first] = decode(entries, lambda key, p=param, o=own: targets.of_parameter(key, p, o))
    _check_cuts(held, model, state)
    return SavedOptimizers(settings, state)


def _check_cuts(held: Held, model: nn.Module, state: Mapping[str, Mapping[str, Any]]) -> None:
    """Refuse a state of another shape than its parameter, as Adafactor's, which FSDP1 would cut wrongly."""
    handles = [fsdp1_handle(module) for module in model.modules() if isinstance(module, FSDP1)]
    if not any(handle is not None and handle.uses_sharded_strategy for handle in handles):
        return
    for name, entries in state.items():
        shape = held.tensors[MODEL + name].shape
        for what, value in entries.items():
            if isinstance(value, Tensor) and value.dim() and value.shape != shape:
                raise CheckpointError(
                    f"optimizer state {what!r} of {name}: expected shape {list(shape)}, the parameter's, "
                    f"which FSDP1 can cut, found {list(value.shape)}. Load it into FSDP2, DDP or no wrapper"
                )


def put_back_optimizers(model: nn.Module, optimizers: Sequence[Optimizer], saved: SavedOptimizers) -> None:
    """Restore each optimizer by its load_state_dict(), from filled tensors. A collective under FSDP1.

    torch's set_optimizer_state_dict() would do that too, but takes a step where there is no state yet, mixes
    the groups up where one of them is empty, and refuses an FSDP1 unit inside of activation checkpointing.
    """
    names, settings = parameter_names(model), iter(saved.settings)
    for optimizer in optimizers:
        params = [param for group in optimizer.param_groups for param in group["params"]]
        numbers = {param: number for number, param in enumerate(params)}
        groups = [
            {**next(settings), "params": [numbers[param] for param in group["params"]]}
            for group in optimizer.param_groups
        ]
        if has_fsdp1(model):
            fqns = [some for param, some in get_param_to_fqns(model).items() if param in numbers]
            stored = {plain_name(fqn): fqn for some in fqns for fqn in some}
            state: Any = {stored[name]: entries for name, entries in saved.state.items() if name in stored}
            with in_parts(model):
                state = FSDP1.optim_state_dict_to_load(model, optimizer, {"state": state})["state"]
        else:
            found = {number: saved.state.get(names[param][0]) for param, number in numbers.items()}
            state = {number: entries for number, entries in found.items() if entries}
        given = state
        if type(optimizer).load_state_dict is Optimizer.load_state_dict:
            # which takes apart what is no tensor, and drops imaginary parts
            given = {
                number: {
                    what: value
                    for what, value in entries.items()
                    if isinstance(value, Tensor) and value.is_complex() == params[number].is_complex()
                }
                for number, entries in state.items()
            }
        optimizer.load_state_dict({"state": given, "param_groups": groups})
        for number, entries in state.items():
            own = optimizer.state[params[number]]
            for what, value in entries.items():
                pair = (own.get(what), value)
                converted = all(isinstance(one, Tensor) for one in pair) and pair[0].dtype != value.dtype
                if what not in given[number] or converted:  # to the dtype of the parameter
                    own[what] = value.to(params[number].device) if isinstance(value, Tensor) else value


# ---- the model ---------------------------------------------------------------------------------------


def put_back_model(model: nn.Module, held: Held, extra: Mapping[str, Any]) -> None:
    """Restore the model from what Held.of() took of it, with filled tensors. A collective under FSDP1."""
    own = {
        _address(tensor)
        for tensor in (*model.parameters(), *model.buffers())
        if tensor.layout == torch.strided  # no sparse buffer, which is in no checkpoint
    }
    if not extra and all(_address(tensor) in own for tensor in held.of_model().values()):
        return  # the tensors are the model's own
    state, raw = dict(held.state_dict), held.raw_names
    state.update({raw[name]: value for name, value in extra.items()})
    state.update({raw[alias]: state[raw[name]] for alias, name in held.tied.items()})
    with quiet():
        set_model_state_dict(model, state)
