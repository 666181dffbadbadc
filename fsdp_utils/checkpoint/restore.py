"""Check a checkpoint against a model and its optimizers before anything is changed; put the values back."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from itertools import chain
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
from fsdp_utils.checkpoint.state import MODEL, OPTIMIZER, Held, has_fsdp1, in_parts, optimizer_classes, quiet
from fsdp_utils.sharding.local_part import is_readable, local
from fsdp_utils.sharding.names import plain_name, some_names
from fsdp_utils.torch_internals.fsdp import fsdp1_handle
from fsdp_utils.torch_internals.names import get_param_to_fqns

_SHOWN = 5  # problems in one error
_LAYOUT = ("shape", "device", "device_mesh", "placements")


class Matched(NamedTuple):
    """Which tensors of a model are stored, and which names only one of the two has."""

    stored: dict[str, list[str]]  # by name in the model, the names under which it is stored
    missing: list[str]  # in the model
    unexpected: list[str]  # in the store


def match_model(
    held: Held,
    found: Mapping[str, Tensor],
    where: str,
    remedy: str,
    *,
    cast: bool = False,
    strict: bool = True,
    ignored: Collection[str] = (),
) -> Matched:
    """Match the tensors of a model with stored ones, and check that they are alike."""
    own, stored, unexpected = held.of_model(), {}, []
    problems: dict[str, list[str]] = {}  # the names that have it, by problem
    for name, spec in found.items():
        first = held.first_name(name)
        if name in ignored or first not in own:
            unexpected.append(name)
            continue
        stored.setdefault(first, []).append(name)
        param = own[first]
        if spec.shape != param.shape:
            problem = f"expected shape {list(param.shape)} (the model's), found {list(spec.shape)}"
            problems.setdefault(problem, []).append(name)
        if spec.dtype != param.dtype and not cast:
            problem = f"expected {param.dtype} (the model's), found {spec.dtype}; cast=True converts them"
            problems.setdefault(problem, []).append(name)
    missing = [name for name in own if name not in stored]
    if strict or not stored:
        for problem, names in (
            (f"expected by the model, found nothing; {remedy}", missing),
            (f"expected by nothing in the model, found; {remedy}", unexpected),
        ):
            problems |= {problem: left} if (left := [name for name in names if name not in ignored]) else {}
    if problems:
        lines = [f"{some_names(names)}: {problem}" for problem, names in problems.items()]
        more = [f"... and {len(lines) - _SHOWN} more"] * (len(lines) > _SHOWN)
        text = "\n  ".join([*lines[:_SHOWN], *more])
        raise CheckpointError(f"{where} is of another model:\n  {text}")
    return Matched(stored, missing, unexpected)


# ---- where to read to --------------------------------------------------------------------------------


class Targets(list[tuple[str, Tensor]]):
    """The tensors to fill, with their keys; codec.decode() has its methods allocate what it asks for."""

    def __init__(self, held: Held, specs: Mapping[str, Tensor]) -> None:
        self.specs = specs
        self._taken = _memory(held.tensors.values())
        self._params = {name: one for name, one in held.of_model().items() if isinstance(one, DTensor)}

    def full(self, key: str, _: object = None) -> Tensor:
        """Allocate a full tensor in CPU memory."""
        return self._add(key, torch.empty_like(self.specs[key], device="cpu"))

    def of_state(self, key: str, dims: list[int | None]) -> Tensor:
        """Allocate a tensor of the user's state, which a mesh sharded along dims.

        A DTensor that has the name and shape of a parameter, as an average of the weights has, is sharded as
        that is. Another one is sharded over the model's mesh along the dimensions that it was before, as many
        as the mesh has; or it is full, where the model has no mesh.
        """
        mesh = next((param.device_mesh for param in self._params.values()), None)
        if not dims or mesh is None:
            return self.full(key)
        spec, parts = self.specs[key], key.split(".")
        for start in range(1, len(parts)):  # the longest name first; AveragedModel's begin with "module."
            param = self._params.get(plain_name(*parts[start:]))
            if param is not None and param.shape == spec.shape:
                return self.like(param, {}, key, dims)
        if len(dims) != mesh.ndim:
            sharded = [dim for dim in dims if dim is not None][-mesh.ndim :]
            dims = [None] * (mesh.ndim - len(sharded)) + sharded
        placements: list[Placement] = [Replicate() if dim is None else Shard(dim) for dim in dims]
        new = empty_dtensor(spec.shape, dtype=spec.dtype, device_mesh=mesh, placements=placements)
        return self._add(key, new)

    def like(self, param: Tensor, old: dict[str, Any], key: str, dims: list[int | None]) -> Tensor:
        """Make a tensor on a parameter's device, and sharded as that is, where it has its shape."""
        spec, there = self.specs[key], old.pop(key.rpartition(".")[2], None)
        if param.shape == spec.shape:
            # The old one, if it is alike: new memory takes longer to get than to read into.
            alike = all(getattr(there, what, None) == getattr(param, what, None) for what in _LAYOUT)
            if alike and there.dtype == spec.dtype and local(there).is_contiguous():
                memory = _memory([there])
                if memory and not memory & self._taken:  # else it has the values of something else, too
                    self._taken |= memory
                    return self._add(key, there)
            del there
            return self._add(key, torch.empty_like(param, dtype=spec.dtype, requires_grad=False))
        if dims and isinstance(param, DTensor):  # as the scales of quantized moments
            return self.of_state(key, dims)
        return self._add(key, torch.empty_like(spec, device=param.device if spec.shape else "cpu"))

    def _add(self, key: str, tensor: Any) -> Tensor:
        self.append((key, tensor))
        return tensor


def _memory(tensors: Iterable[Tensor]) -> set[int]:
    """Return where the storages of these tensors begin."""
    return {part.untyped_storage().data_ptr() for part in map(local, tensors) if is_readable(part)}


# ---- optimizers --------------------------------------------------------------------------------------


def match_optimizers(
    held: Held, model: nn.Module, optimizers: Sequence[Optimizer], plain: Mapping[str, Any], targets: Targets
) -> list[dict[str, Any]]:
    """Find each group of parameters among those that were saved; return the settings of each."""
    if not optimizers:
        return []

    def named(params: Iterable[str]) -> list[str]:
        return sorted(map(held.first_name, params))

    here = [
        (optimizer_classes(one), named(name for param in group["params"] for name in held.names[param]))
        for one in optimizers
        for group in one.param_groups
    ]
    saved = decode(plain["param_groups"], targets.full)
    own, other = [params for _, params in here], [named(one["params"]) for one in saved]
    if sorted(own) != sorted(other):
        only_here, only_there = {*chain(*own)} - {*chain(*other)}, {*chain(*other)} - {*chain(*own)}
        raise CheckpointError(
            f"expected optimizers with groups of {[*map(len, own)]} parameters, found {[*map(len, other)]} "
            f"in the checkpoint; only here: {sorted(only_here)[:3]}; only in the checkpoint: "
            f"{sorted(only_there)[:3]}. Give the optimizers that were saved, in any order, or none if they "
            "are to start anew"
        )
    settings = []
    for classes, params in here:
        alike = [n for n, some in enumerate(other) if some == params]  # several only without parameters
        related = [n for n in alike if {*saved[n]["classes"]} & {*classes}]
        if not related:
            raise CheckpointError(
                f"expected the state of {classes[0]}, found that of {saved[alike[0]]['classes'][0]}, which "
                f"{classes[0]} cannot go on from. Load into that class, or without the optimizer if it is to "
                "start anew"
            )
        other.pop(related[0])
        settings.append(saved.pop(related[0])["settings"])
    _check_cuts(held, model, plain["optimizer"], targets)
    return settings


def _check_cuts(held: Held, model: nn.Module, saved: Mapping[str, Any], targets: Targets) -> None:
    """Refuse a state of another shape than its parameter, as Adafactor's, which FSDP1 would cut wrongly."""
    handles = [fsdp1_handle(module) for module in model.modules() if isinstance(module, FSDP1)]
    if not any(handle is not None and handle.uses_sharded_strategy for handle in handles):
        return
    for name, what in ((name, what) for name, entries in saved.items() for what in entries):
        shape = held.tensors[MODEL + held.first_name(name)].shape
        spec = targets.specs.get(f"{OPTIMIZER}{name}.{what}")
        if spec is not None and spec.shape not in ((), shape):
            raise CheckpointError(
                f"optimizer state {what!r} of {name}: expected shape {list(shape)}, the parameter's, "
                f"which FSDP1 can cut, found {list(spec.shape)}. Load it into FSDP2, DDP or no wrapper"
            )


def new_state(
    held: Held, optimizers: Sequence[Optimizer], plain: Mapping[str, Any], targets: Targets
) -> dict[str, dict[str, Any]]:
    """Make the state of the optimizers, by name of the parameter, in the memory of their old one."""
    old: dict[str, dict[str, Any]] = {}
    for optimizer in optimizers:
        if type(optimizer).load_state_dict is Optimizer.load_state_dict:  # another may go on from its state
            for param in held.names.keys() & optimizer.state.keys():
                old[held.names[param][0]] = dict(optimizer.state[param])
            optimizer.state.clear()
    state: dict[str, dict[str, Any]] = {}
    for name, entries in plain["optimizer"].items() if optimizers else ():
        first = held.first_name(name)
        state[first] = decode(entries, partial(targets.like, held.tensors[MODEL + first], old.pop(first, {})))
    return state


def put_back_optimizers(
    held: Held,
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    settings: Iterable[dict[str, Any]],
    saved: Mapping[str, Mapping[str, Any]],
) -> None:
    """Restore each optimizer by its load_state_dict(), from filled tensors. A collective under FSDP1.

    torch's set_optimizer_state_dict() would do that too, but takes a step where there is no state yet, mixes
    the groups up where one of them is empty, and refuses an FSDP1 unit inside of activation checkpointing.
    """
    settings = iter(settings)
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
            state: Any = {stored[name]: entries for name, entries in saved.items() if name in stored}
            with in_parts(model):
                state = FSDP1.optim_state_dict_to_load(model, optimizer, {"state": state})["state"]
        else:
            here = {number: held.names[param][0] for param, number in numbers.items()}
            state = {number: saved[name] for number, name in here.items() if name in saved}
        if type(optimizer).load_state_dict is not Optimizer.load_state_dict:
            optimizer.load_state_dict({"state": state, "param_groups": groups})
            continue
        # torch's would convert dtypes, drop imaginary parts, and take apart what is no tensor.
        optimizer.load_state_dict({"state": {}, "param_groups": groups})
        for group in optimizer.param_groups:
            # These ways have the count of steps on the parameter's device, all others on the CPU.
            moved = group.get("fused") or group.get("capturable")
            for param in group["params"]:
                for what, value in state.get(numbers[param], {}).items():
                    stays = not isinstance(value, Tensor) or (what == "step" and not moved)
                    optimizer.state[param][what] = value if stays else value.to(param.device)


# ---- the model ---------------------------------------------------------------------------------------


def put_back_model(model: nn.Module, held: Held, extra: Mapping[str, Any]) -> None:
    """Restore the model from what Held.of() took of it, with filled tensors. A collective under FSDP1."""
    own = {
        local(one).data_ptr() for one in (*model.parameters(), *model.buffers()) if is_readable(local(one))
    }
    if not extra and all(local(one).data_ptr() in own for one in held.of_model().values()):
        return  # the tensors that were filled are the model's own
    state, raw = dict(held.state_dict), held.raw_names
    state.update({raw[name]: value for name, value in extra.items()})
    state.update({raw[alias]: state[raw[name]] for alias, name in held.tied.items()})
    with quiet():
        set_model_state_dict(model, state)
