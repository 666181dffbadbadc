"""Check a checkpoint against a model and its optimizers before anything is changed; put the values back."""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any

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
from fsdp_utils.torch_internals.names import get_param_to_fqns

_SHOWN = 5  # problems in one error
_LAYOUT = ("shape", "device", "device_mesh", "placements")


def match_model(
    held: Held,
    found: Mapping[str, Tensor],
    where: str,
    remedy: str,
    *,
    cast: bool = False,
    strict: bool = True,
) -> tuple[dict[str, list[str]], list[str], list[str]]:
    """Match the tensors of a model with stored ones, and check that they are alike.

    Returns:
        By name in the model the names under which it is stored; names only in the model; only in the store.
    """
    own, stored, unexpected = held.of_model(), {}, []
    problems: dict[str, list[str]] = {}  # the names that have it, by problem
    for name, spec in found.items():
        first = held.first_name(name)
        if first not in own:
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
            problems |= {problem: names} if names else {}
    if problems:
        lines = [f"{some_names(names)}: {problem}" for problem, names in problems.items()]
        more = [f"... and {len(lines) - _SHOWN} more"] * (len(lines) > _SHOWN)
        text = "\n  ".join([*lines[:_SHOWN], *more])
        raise CheckpointError(f"{where} is of another model:\n  {text}")
    return stored, missing, unexpected


# ---- where to read to --------------------------------------------------------------------------------


class Targets(list[tuple[str, Tensor]]):
    """The tensors to fill, with their keys; codec.decode() has its methods allocate what it asks for."""

    def __init__(self, held: Held, specs: Mapping[str, Tensor]) -> None:
        self.specs, self._held = specs, held
        self._taken = _memory(held.tensors.values())
        self._params = {name: one for name, one in held.of_model().items() if isinstance(one, DTensor)}

    def of_model(self, stored: Mapping[str, Sequence[str]], tied: Mapping[str, str]) -> None:
        """Add the model's own tensors, each with the names under which it is stored."""
        for name, names in stored.items():
            if self._held.tensors[MODEL + name].is_meta:
                raise CheckpointError(
                    f"expected a model with memory, found {name!r} on the meta device. Not to_empty(), which "
                    "leaves buffers that are not saved uninitialised, but load_pretrained(folder, model) "
                    "gives it memory and values; export_safetensors makes a folder of a checkpoint"
                )
            first, *others = {tied.get(one, one) for one in names}
            if others:
                raise CheckpointError(
                    f"{name}: expected one tensor under all of its names {names} (tied in the model), found "
                    "several in the checkpoint"
                )
            self._add(MODEL + first, self._held.tensors[MODEL + name])

    def full(self, key: str, _: object = None) -> Tensor:
        """Allocate a full tensor in CPU memory."""
        return self._add(key, torch.empty_like(self.specs[key], device="cpu"))

    def of_state(self, key: str, dims: list[int | None] | None) -> Tensor:
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

    def like(self, param: Tensor, old: dict[str, Any], key: str, dims: list[int | None] | None) -> Tensor:
        """Make a tensor on a parameter's device, and sharded as that is, where it has its shape."""
        spec, there = self.specs[key], old.pop(key.rpartition(".")[2], None)
        if dims is None:
            return self.full(key)
        if param.shape == spec.shape:
            # The old one, if it is alike: new memory takes longer to get than to read into.
            alike = all(getattr(there, what, None) == getattr(param, what, None) for what in _LAYOUT)
            memory = _memory([there]) if alike and there.dtype == spec.dtype else set()
            # taken memory has the values of something else, too
            if memory and not memory & self._taken and local(there).is_contiguous():
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
    here = [
        (optimizer_classes(one), held.named(name for param in group["params"] for name in held.names[param]))
        for one in optimizers
        for group in one.param_groups
    ]
    there: dict[tuple[str, ...], list[dict[str, Any]]] = {}  # several groups only without parameters
    for one in decode(plain["param_groups"], targets.full):
        there.setdefault(held.named(one["params"]), []).append(one)
    own, other = [params for _, params in here], [params for params, some in there.items() for _ in some]
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
        saved = there[params].pop(0)
        if not {*saved["classes"]} & {*classes}:
            raise CheckpointError(
                f"expected the state of {classes[0]}, found that of {saved['classes'][0]}, which it cannot "
                "go on from. Load into that class, or without the optimizer if it is to start anew"
            )
        settings.append(saved["settings"])
    for name, entries in plain["optimizer"].items() if has_fsdp1(model) else ():
        shape = held.tensors[MODEL + held.first_name(name)].shape
        for what in entries:
            spec = targets.specs.get(f"{OPTIMIZER}{name}.{what}")
            if spec is not None and spec.shape not in ((), shape):  # as Adafactor's
                raise CheckpointError(
                    f"optimizer state {what!r} of {name}: expected shape {list(shape)}, the parameter's, "
                    f"which FSDP1 can cut, found {list(spec.shape)}. Load it into FSDP2, DDP or no wrapper"
                )
    return settings


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
    """Restore the model from what a Held took of it, with filled tensors. A collective under FSDP1."""
    parts = map(local, (*model.parameters(), *model.buffers()))
    own = {part.data_ptr() for part in parts if is_readable(part)}
    if not extra and all(local(one).data_ptr() in own for one in held.of_model().values()):
        return  # the tensors that were filled are the model's own
    state, raw = dict(held.state_dict), held.raw_names
    state.update({raw[name]: value for name, value in extra.items()})
    state.update({raw[alias]: state[raw[name]] for alias, name in held.tied.items()})
    with quiet():
        set_model_state_dict(model, state)
