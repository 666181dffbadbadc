"""Check a checkpoint against a model and its optimizers before anything is changed; put the values back."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor import empty as empty_dtensor
from torch.optim import Optimizer

from fsdp_utils.checkpoint.codec import decode
from fsdp_utils.checkpoint.errors import CheckpointError
from fsdp_utils.checkpoint.state import (
    MODEL,
    OPTIMIZER,
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
) -> Matched:
    """Match the tensors of a model with stored ones, and check that they are alike."""
    own, stored = held.of_model(), {}
    for name in found:
        if held.first_name(name) in own:
            stored.setdefault(held.first_name(name), []).append(name)
    missing = [name for name in own if name not in stored]
    unexpected = [name for name in found if held.first_name(name) not in own]
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
            problems |= {problem: names} if names else {}
    if problems:
        lines = [f"{_some(names)}: {problem}" for problem, names in problems.items()]
        more = [f"... and {len(lines) - _SHOWN} more"] * (len(lines) > _SHOWN)
        text = "\n  ".join([*lines[:_SHOWN], *more])
        raise CheckpointError(f"{where} is of another model:\n  {text}")
    return Matched(stored, missing, unexpected)


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


# ---- where to read to --------------------------------------------------------------------------------


class Targets(dict[str, Tensor]):
    """The tensors to fill, by key. Indexing allocates what codec.decode() asks for."""

    def __init__(self, held: Held, specs: Mapping[str, Spec], dims: Mapping[str, list[int | None]]) -> None:
        super().__init__()
        self._held, self._specs, self._dims = held, specs, dims
        self._params = held.of_model()
        self._mesh = next(
            (one.device_mesh for one in self._params.values() if isinstance(one, DTensor)), None
        )
        self._taken = {_address(tensor) for tensor in self._params.values()}

    def __missing__(self, key: str) -> Tensor:
        name, _, _ = key.removeprefix(OPTIMIZER).rpartition(".")
        param = self._params.get(self._held.first_name(name)) if key.startswith(OPTIMIZER) else None
        if param is not None:
            self[key] = self._of_parameter(key, param)
        elif key in self._dims and self._mesh is not None:
            self[key] = self._of_state(key, self._mesh)
        else:
            self[key] = self._full(key, torch.device("cpu"))
        return self[key]

    def _full(self, key: str, device: torch.device) -> Tensor:
        return torch.empty(self._specs[key].shape, dtype=self._specs[key].dtype, device=device)

    def _of_state(self, key: str, mesh: DeviceMesh) -> Tensor:
        """Allocate a DTensor of the user's state.

        One that has the name and shape of a parameter, as an average of the weights has, is sharded as that
        is; another one over the model's mesh, along the dimensions that it was before, as many as it has.
        """
        spec, parts, dims = self._specs[key], key.split("."), self._dims[key]
        for start in range(1, len(parts)):  # the longest name first; AveragedModel's begin with "module."
            param = self._params.get(plain_name(*parts[start:]))
            if isinstance(param, DTensor) and tuple(param.shape) == spec.shape:
                return torch.empty_like(param, dtype=spec.dtype, requires_grad=False)
        if len(dims) != mesh.ndim:
            sharded = [dim for dim in dims if dim is not None][-mesh.ndim :]
            dims = [None] * (mesh.ndim - len(sharded)) + sharded
        placements: list[Placement] = [Replicate() if dim is None else Shard(dim) for dim in dims]
        return empty_dtensor(spec.shape, dtype=spec.dtype, device_mesh=mesh, placements=placements)

    def _of_parameter(self, key: str, param: Tensor) -> Tensor:
        """Find or allocate a tensor of an optimizer's state, sharded as its parameter is.

        Where the optimizer has such a tensor already it is that one: a second copy of the state takes memory,
        and getting it from the system takes longer than filling it.
        """
        spec, there = self._specs[key], self._held.tensors.get(key)
        if tuple(param.shape) != spec.shape:
            return self._full(key, param.device if spec.shape else torch.device("cpu"))
        if (
            there is not None
            and there.dim()  # one number may be shared by several parameters
            and (there.dtype, there.shape, there.device) == (spec.dtype, param.shape, param.device)
            and _sharding(there) == _sharding(param)
            and _address(there) not in self._taken
        ):
            self._taken.add(_address(there))
            return there
        return torch.empty_like(param, dtype=spec.dtype, requires_grad=False)


def _sharding(tensor: Tensor) -> object:
    return (tensor.device_mesh, tensor.placements) if isinstance(tensor, DTensor) else None


def _address(tensor: Any) -> int:
    return local(tensor).data_ptr()


# ---- optimizers --------------------------------------------------------------------------------------


class Restored(NamedTuple):
    """What is to be put back into one optimizer."""

    optimizer: Optimizer
    settings: list[dict[str, Any]]  # of each group
    state: dict[str, dict[str, Any]]  # by name of the parameter


def match_optimizers(
    held: Held,
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    plain: Mapping[str, Any],
    targets: Targets,
) -> list[Restored]:
    """Find what was saved of each optimizer, by the names of its parameters, and check it."""
    if not optimizers:
        return []
    here = [held.groups(model, one) for one in optimizers]
    left = [decode(one, targets.__getitem__) for one in plain["optimizers"]]
    there = [[sorted(map(held.first_name, group["params"])) for group in one["groups"]] for one in left]
    if sorted(here) != sorted(there):
        own, saved = ({name for one in some for group in one for name in group} for some in (here, there))
        raise CheckpointError(
            f"expected optimizers with groups of {_sizes(here)} parameters, found {_sizes(there)} in the "
            f"checkpoint; only here: {sorted(own - saved)[:3]}; only in the checkpoint: "
            f"{sorted(saved - own)[:3]}. Give the optimizers that were saved, in any order, or none if they "
            "are to start anew"
        )
    found = []
    for optimizer, groups in zip(optimizers, here, strict=True):
        index, classes = there.index(groups), optimizer_classes(optimizer)
        there.pop(index)
        saved = left.pop(index)
        if not set(saved["classes"]) & set(classes):
            raise CheckpointError(
                f"expected the state of {classes[0]}, found that of {saved['classes'][0]}, from which "
                f"{classes[0]} cannot go on. Load into that class, or without the optimizer to start it anew"
            )
        state = {
            name: decode(entries, targets.__getitem__)
            for name, entries in ((held.first_name(name), one) for name, one in plain["optimizer"].items())
            if any(name in group for group in groups)
        }
        _check_cuts(held, model, state)
        found.append(Restored(optimizer, [group["settings"] for group in saved["groups"]], state))
    return found


def _sizes(optimizers: Sequence[list[list[str]]]) -> list[int]:
    return [len(group) for groups in optimizers for group in groups]


def _check_cuts(held: Held, model: nn.Module, state: Mapping[str, Mapping[str, Any]]) -> None:
    """Refuse a state of another shape than its parameter, as Adafactor's, which FSDP1 would cut wrongly."""
    units = (fsdp1_handle(module) for module in model.modules() if isinstance(module, FSDP1))
    cuts = any(handle is not None and handle.uses_sharded_strategy for handle in units)
    for name, entries in state.items() if cuts else ():
        shape = held.tensors[MODEL + name].shape
        for what, value in entries.items():
            if isinstance(value, Tensor) and value.dim() and value.shape != shape:
                raise CheckpointError(
                    f"optimizer state {what!r} of {name}: expected shape {list(shape)}, the parameter's, "
                    f"which FSDP1 can cut, found {list(value.shape)}. Load it into FSDP2, DDP or no wrapper"
                )


def put_back_optimizer(model: nn.Module, restored: Restored) -> None:
    """Restore an optimizer by its load_state_dict(), from filled tensors. A collective under FSDP1."""
    optimizer, settings, saved = restored
    params = [param for group in optimizer.param_groups for param in group["params"]]
    numbers = {param: number for number, param in enumerate(params)}
    groups = [
        {**setting, "params": [numbers[param] for param in group["params"]]}
        for setting, group in zip(settings, optimizer.param_groups, strict=True)
    ]
    if has_fsdp1(model):
        fqns = {plain_name(fqn): fqn for some in get_param_to_fqns(model).values() for fqn in some}
        state: Any = {"state": {fqns[name]: entries for name, entries in saved.items()}}
        with in_parts(model):
            state = FSDP1.optim_state_dict_to_load(model, optimizer, state)["state"]
    else:
        names = parameter_names(model)
        found = {number: saved.get(names[param][0]) for param, number in numbers.items()}
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
