"""Check a checkpoint against a model and its optimizers before anything is changed; put the values back."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import set_model_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1
from torch.distributed.fsdp import StateDictType
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor import empty as empty_dtensor
from torch.optim import Optimizer

from fsdp_utils.checkpoint.codec import decode
from fsdp_utils.checkpoint.errors import CheckpointMismatchError
from fsdp_utils.checkpoint.state import (
    MODEL,
    OPTIMIZER,
    Held,
    has_fsdp1,
    optimizer_classes,
    parameter_names,
    quiet,
)
from fsdp_utils.checkpoint.tensor_files import Spec
from fsdp_utils.sharding.local_part import local
from fsdp_utils.sharding.names import plain_name
from fsdp_utils.sharding.unsaved_buffers import unsaved
from fsdp_utils.torch_internals.fsdp import fsdp1_handle
from fsdp_utils.torch_internals.names import get_param_to_fqns

Specs = Mapping[str, Spec]  # of tensors in a checkpoint, by key

_SHOWN = 5  # problems in one error


class NotLoaded(NamedTuple):
    """What a load leaves as it is, by name."""

    missing_keys: list[str]  # in the model
    unexpected_keys: list[str]  # in the checkpoint


def check_model(
    model: nn.Module,
    held: Held,
    specs: Specs,
    tied: Mapping[str, str],
    *,
    cast: bool,
    strict: bool,
    ignored: Collection[str],
) -> NotLoaded:
    """Check that the checkpoint holds exactly this model.

    Args:
        held: of the model.
        tied: further names of tied parameters in the checkpoint, with their first names.
        cast: another dtype is no mistake.
        strict: False if what only one of the two has is no mistake.
        ignored: names in the model that are not to be loaded.

    Returns:
        What will not be loaded.

    Raises:
        CheckpointMismatchError: with the first few differences.
    """
    found = {key.removeprefix(MODEL): spec for key, spec in specs.items() if key.startswith(MODEL)}
    found |= {alias: found[name] for alias, name in tied.items()}
    own, ignored = held.of_model(), set(ignored)
    both = {name: tensor for name, tensor in own.items() if name in found and name not in ignored}
    missing = [name for name in own if name not in both]
    unexpected, two = [], []
    for name in found:
        first = held.first_name(name)
        if name in ignored or (first not in own and name not in held.tied) or first not in found:
            unexpected.append(name)
        elif tied.get(name, name) != tied.get(first, first):
            two.append(
                f"{MODEL}{name}: expected one tensor under this name and {first!r} (tied in the model), "
                "found two in the checkpoint"
            )
    problems = [
        f"{MODEL}{name}: expected shape {list(tensor.shape)} (the model's), found {list(found[name].shape)} "
        "in the checkpoint"
        for name, tensor in both.items()
        if found[name].shape != tensor.shape
    ]
    if strict:
        problems += [
            f"{MODEL}{name}: expected by the model, found nothing in the checkpoint"
            for name in missing
            if name not in ignored
        ]
        problems += [
            f"{MODEL}{name}: in the checkpoint, expected by nothing in the model"
            for name in unexpected
            if name not in ignored
        ]
    problems += two
    others: dict[str, list[str]] = {}
    for name, tensor in both.items():
        if found[name].dtype != tensor.dtype:
            kind = f"expected {tensor.dtype} (the model's), found {found[name].dtype} in the checkpoint"
            others.setdefault(kind, []).append(name)
    if others and not cast:
        kinds = [f"{MODEL}{first}{_more(names)}: {kind}" for kind, (first, *names) in others.items()]
        problems.append(f"{'; '.join(kinds)}; cast=True converts them")
    if not problems and found and own and not both:
        problems.append(
            f"expected at least one tensor to load, found none: the model has {missing[:3]}, the checkpoint "
            f"{list(found)[:3]}"
        )
    if on_meta := [name for name, tensor in both.items() if tensor.is_meta]:
        buffers = ", ".join([name for name, _ in unsaved(model)][:5]) or "none here"
        problems.insert(
            0,
            f"{MODEL}{on_meta[0]}{_more(on_meta[1:])}: on the meta device. "
            "load_pretrained(folder, model) gives it memory and values, and computes the buffers that no "
            f"checkpoint holds ({buffers}), which to_empty() leaves uninitialised; export_safetensors makes "
            "a folder of a checkpoint",
        )
    if problems:
        shown = problems[:_SHOWN] + [f"... and {len(problems) - _SHOWN} more"] * (len(problems) > _SHOWN)
        if strict and (missing or unexpected):
            shown.append("strict=False loads what both have, and returns the names of the rest")
        raise CheckpointMismatchError("the checkpoint is of another model:\n  " + "\n  ".join(shown))
    return NotLoaded(missing, unexpected)


# ---- where to read to --------------------------------------------------------------------------------


class Buffers(dict[str, Tensor]):
    """The tensors to fill, by key; what codec.decode() asks for is allocated, in the checkpoint's dtype.

    An optimizer's state is sharded as its parameter is. Where the optimizer has such a tensor already it is
    that one: a second copy of the state takes memory, and getting it from the system takes longer than
    filling it. An optimizer with a state_dict() of its own may hold something else under the same name.

    A DTensor of the user's state that has the name and shape of a parameter, as an average of the weights
    has, is sharded as that is. Another one is sharded over the model's mesh along the dimensions that it was
    before, as many as the mesh has; or it is full, where the model has no mesh.

    Args:
        held: of the model.
        dims: of the DTensors in the user's state, as Held.plain has them.
    """

    def __init__(
        self,
        held: Held,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        specs: Specs,
        dims: Mapping[str, list[int | None]],
    ) -> None:
        self.param: Tensor | None = None  # of which the state is decoded
        self._specs, self._dims = specs, dims
        self._params = {name: one for name, one in held.of_model().items() if isinstance(one, DTensor)}
        as_they_are = [one for one in optimizers if type(one).state_dict is Optimizer.state_dict]
        self._own = {
            f"{OPTIMIZER}{names[0]}.{what}": value
            for param, names in parameter_names(model).items()
            for one in (() if has_fsdp1(model) else as_they_are)
            for what, value in (one.state[param].items() if param in one.state else ())
            if isinstance(value, Tensor) and value.dim()  # one number may be shared by several parameters
        }
        self._taken = {_address(tensor) for tensor in held.tensors.values()}

    def __missing__(self, key: str) -> Tensor:
        dtype, shape = self._specs[key].dtype, torch.Size(self._specs[key].shape)
        if self.param is not None:
            self[key] = self._of_optimizer(key, self.param, dtype, shape)
        elif key in self._dims:
            self[key] = self._of_state(key, dtype, shape)
        else:
            self[key] = torch.empty(shape, dtype=dtype, device="cpu")
        return self[key]

    def _of_optimizer(self, key: str, param: Tensor, dtype: torch.dtype, shape: torch.Size) -> Tensor:
        own = self._own.get(key)
        if (
            own is not None
            and (own.dtype, own.shape, own.device) == (dtype, shape, param.device)
            and _sharding(own) == _sharding(param)
            and _address(own) not in self._taken
        ):
            self._taken.add(_address(own))
            return own
        if param.shape == shape:
            return torch.empty_like(param, dtype=dtype, requires_grad=False)
        return torch.empty(shape, dtype=dtype, device=param.device if shape else "cpu")

    def _of_state(self, key: str, dtype: torch.dtype, shape: torch.Size) -> Tensor:
        parts, dims = key.split("."), self._dims[key]
        for start in range(1, len(parts)):  # the longest name first; AveragedModel's begin with "module."
            param = self._params.get(plain_name(*parts[start:]))
            if param is not None and param.shape == shape:
                return torch.empty_like(param, dtype=dtype, requires_grad=False)
        mesh = next((param.device_mesh for param in self._params.values()), None)
        if mesh is None:
            return torch.empty(shape, dtype=dtype, device="cpu")
        if len(dims) != mesh.ndim:
            sharded = [dim for dim in dims if dim is not None][-mesh.ndim :]
            dims = [None] * (mesh.ndim - len(sharded)) + sharded
        placements: list[Placement] = [Replicate() if dim is None else Shard(dim) for dim in dims]
        return empty_dtensor(shape, dtype=dtype, device_mesh=mesh, placements=placements)


def _more(names: list[str]) -> str:
    return f" and {len(names)} more" if names else ""


# ---- optimizers --------------------------------------------------------------------------------------


class SavedOptimizer(NamedTuple):
    """What a checkpoint holds of an optimizer."""

    groups: list[dict[str, Any]]  # param_groups, with names under "params"
    state: dict[str, dict[str, Any]]  # by name of the parameter


def match_optimizers(
    held: Held,
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    plain: list[dict[str, Any]],
    buffers: Buffers,
) -> list[SavedOptimizer]:
    """Find what was saved of each optimizer, by its parameters, and check it.

    Args:
        held: of the model.
        plain: of the optimizers, as Held has it.
        buffers: takes the tensors of the optimizers' state.

    Raises:
        CheckpointMismatchError: there is none, or it is of others.
    """
    if not optimizers:
        return []
    if not plain:
        raise CheckpointMismatchError(
            "expected the state of an optimizer, found none: the checkpoint was saved without one. "
            "Load without the optimizer if it is to start anew."
        )
    if len(plain) != len(optimizers):
        own = ", ".join(optimizer_classes(one)[0] for one in optimizers[:5])
        raise CheckpointMismatchError(
            f"expected the state of {len(optimizers)} optimizers ({own}{', ...' * (len(optimizers) > 5)}), "
            f"found that of {len(plain)} in the checkpoint. Give as many as were saved, in any order, or "
            "none if they are to start anew."
        )
    names = parameter_names(model)

    def by_names(groups: Iterable[Iterable[str]]) -> list[list[str]]:
        return sorted(sorted(map(held.first_name, group)) for group in groups)

    here = [
        by_names([name for param in group["params"] for name in names[param]] for group in one.param_groups)
        for one in optimizers
    ]
    all_groups = [decode(one["groups"], buffers) for one in plain]
    there = [by_names(group["params"] for group in groups) for groups in all_groups]
    found, left = [], list(range(len(plain)))
    for optimizer, own in zip(optimizers, here, strict=True):
        # of the same groups, else of the same parameters, else another one, which the error names
        alike = [number for number in left if there[number] == own]
        alike += [number for number in left if set().union(*there[number]) == set().union(*own)]
        number = (alike or left)[0]
        left.remove(number)
        one = plain[number]
        _check_optimizer(optimizer, own, one["classes"], there[number], map(held.first_name, one["state"]))
        state = {}
        for name, entries in one["state"].items():
            buffers.param = held.tensors[MODEL + held.first_name(name)]
            state[held.first_name(name)] = decode(entries, buffers)
        found.append(SavedOptimizer(all_groups[number], state))
    buffers.param = None
    _check_cuts(held, model, found)
    return found


def _check_optimizer(
    optimizer: Optimizer,
    own: list[list[str]],
    classes: list[str],
    found: list[list[str]],
    with_state: Iterable[str],
) -> None:
    """Check that what was saved is of a related class, over the same parameters in the same groups."""
    kind = optimizer_classes(optimizer)
    if not set(classes) & set(kind):
        raise CheckpointMismatchError(
            f"expected the state of {kind[0]}, found that of {classes[0]}, which {kind[0]} cannot go on "
            f"from. Load into {classes[0]}, or without the optimizer if it is to start anew."
        )
    here, there = set().union(*own), set().union(*found)
    if own != found:
        raise CheckpointMismatchError(
            f"expected an optimizer with parameter groups of {[len(group) for group in own]} parameters, "
            f"found {[len(group) for group in found]} in the checkpoint"
            + (f"; only here: {sorted(here - there)[:3]}" if here - there else "")
            + (f"; only in the checkpoint: {sorted(there - here)[:3]}" if there - here else "")
        )
    if unknown := set(with_state) - here:
        raise CheckpointMismatchError(
            f"expected the optimizer's state of parameters in its groups, found that of {sorted(unknown)[:3]}"
        )


def _check_cuts(held: Held, model: nn.Module, found: Iterable[SavedOptimizer]) -> None:
    """Refuse a state of another shape than its parameter, as Adafactor's, which FSDP1 would cut wrongly."""
    units = [module for module in model.modules() if isinstance(module, FSDP1)]
    if not any(handle.uses_sharded_strategy for unit in units if (handle := fsdp1_handle(unit)) is not None):
        return
    for name, entries in (item for one in found for item in one.state.items()):
        shape = held.tensors[MODEL + name].shape
        for what, value in entries.items():
            if isinstance(value, Tensor) and value.dim() and value.shape != shape:
                raise CheckpointMismatchError(
                    f"optimizer state {what!r} of {name}: expected {shape.numel()} elements, one for each of "
                    f"the parameter, which FSDP1 can cut, found {list(value.shape)}. Load it into FSDP2, DDP "
                    "or no wrapper"
                )


def put_back_optimizers(
    held: Held, model: nn.Module, optimizers: Sequence[Optimizer], found: Sequence[SavedOptimizer]
) -> None:
    """Restore each optimizer by its load_state_dict(). A collective under FSDP1.

    torch's set_optimizer_state_dict() would do that too, but takes a step where there is no state yet, mixes
    the groups up where one of them is empty, and refuses an FSDP1 unit inside of activation checkpointing.

    Args:
        found: from match_optimizers(), with filled tensors.
    """
    names = parameter_names(model)
    by_name = {name: param for param, some in names.items() for name in some}
    for optimizer, saved in zip(optimizers, found, strict=True):
        params = [param for group in optimizer.param_groups for param in group["params"]]
        numbers = {param: number for number, param in enumerate(params)}
        if has_fsdp1(model):
            state = _flattened(model, optimizer, saved.state)
        else:
            state = {numbers[by_name[name]]: entries for name, entries in saved.state.items()}
        of_parameter = {held.first_name(name): group for group in saved.groups for name in group["params"]}
        empty = (group for group in saved.groups if not group["params"])
        groups = []
        for own in optimizer.param_groups:
            group = of_parameter[names[own["params"][0]][0]] if own["params"] else next(empty)
            # The names of the parameters are this optimizer's own, in its order and of its wrapper.
            settings = {key: value for key, value in group.items() if key not in ("params", "param_names")}
            groups.append({**settings, "params": [numbers[param] for param in own["params"]]})
        # torch's load_state_dict() takes apart what is no tensor, and converts dtypes to the parameter's.
        is_torchs = type(optimizer).load_state_dict is Optimizer.load_state_dict
        given = {
            number: {
                what: value
                for what, value in entries.items()
                if not is_torchs
                or (isinstance(value, Tensor) and value.is_complex() == params[number].is_complex())
            }
            for number, entries in state.items()
        }
        optimizer.load_state_dict({"state": given, "param_groups": groups})
        for number, entries in state.items():
            own = optimizer.state[params[number]]
            for what, value in entries.items():
                there = own.get(what)
                tensors = isinstance(value, Tensor) and isinstance(there, Tensor)
                if what not in given[number] or (tensors and there.dtype != value.dtype):
                    own[what] = value.to(params[number].device) if isinstance(value, Tensor) else value


def _flattened(
    model: nn.Module, optimizer: Optimizer, entries: Mapping[str, dict[str, Any]]
) -> dict[int, dict[str, Any]]:
    """Cut the state to this rank's parts of FSDP1's flat parameters; by number in the optimizer."""
    fsdp1_names = [name for names in get_param_to_fqns(model).values() for name in names]
    state = {name: entries[plain_name(name)] for name in fsdp1_names if plain_name(name) in entries}
    with quiet(), FSDP1.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        return FSDP1.optim_state_dict_to_load(model, optimizer, {"state": state})["state"]


# ---- the model ---------------------------------------------------------------------------------------


def put_back_model(model: nn.Module, held: Held, extra: Mapping[str, Any]) -> None:
    """Restore the model from what Held.of() took of it, whose tensors were filled. A collective under FSDP1.

    Args:
        extra: what the model has besides tensors, by name.
    """
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


def _sharding(tensor: Tensor) -> object:
    return (tensor.device_mesh, tensor.placements) if isinstance(tensor, DTensor) else None


def _address(tensor: Tensor) -> int:
    return local(tensor).data_ptr()
