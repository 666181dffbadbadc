"""Collect a model, its optimizers and the user's state: tensors by key, and the rest as JSON."""

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, ShardedOptimStateDictConfig, StateDictType
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from fsdp_utils.checkpoint.codec import encode
from fsdp_utils.checkpoint.errors import CheckpointError
from fsdp_utils.sharding.names import plain_name
from fsdp_utils.torch_internals.fsdp import Flat
from fsdp_utils.torch_internals.names import FLAT_PARAM, WRAPPED, ShardedTensor
from fsdp_utils.torch_internals.runtime import sharded_tensor_group

# What the keys of tensors begin with.
MODEL, EXTRA, OPTIMIZER, STATE, PER_RANK = "model.", "extra.model.", "optimizer.", "state.", "per_rank."
# What a save and a load take as `optimizer`: one, or several over different parameters.
Optimizers = Optimizer | Iterable[Optimizer] | Mapping[Any, Optimizer]


class Held:
    """The tensors of a model, its optimizers and the state by key, and the rest as codec.encode() has it.

    Making one collects the model's state dict, under names without wrappers. A collective under FSDP1.
    """

    def __init__(self, model: nn.Module) -> None:
        with quiet():
            # as torch gives it, over the memory of `tensors`
            self.state_dict: dict[str, Any] = get_model_state_dict(model)
        # names: of parameters, several of one of FSDP1's flat ones. tied: the name of a parameter left out
        # -> the name under which it is there. raw_names: those of the state dict, by those of here.
        self.names, tied = named_parameters(model)
        flat = has_fsdp1(model)  # which cannot load under other names than torch gives
        self.raw_names = {raw if flat else plain_name(raw): raw for raw in self.state_dict}
        params = {name for some in self.names.values() for name in some}
        twice = sorted(map(plain_name, self.state_dict.keys() - self.raw_names.values()))
        if odd := [*twice, *sorted(params - self.raw_names.keys())]:
            raise CheckpointError(
                f"expected one entry {odd[0]!r} in the model's state dict, found "
                f"{'two' if twice else 'none'} under that name without those of wrappers. Rename the module; "
                "or, where a wrapper hides another one, put FSDP1 inside of torch.compile, and activation "
                "checkpointing inside of both and of DDP"
            )
        self.tied = {alias: name for alias, name in tied.items() if alias in self.raw_names}
        own = {name: self.state_dict[raw] for name, raw in self.raw_names.items() if name not in self.tied}
        self.tensors = _as_dtensors({MODEL + k: one for k, one in own.items() if isinstance(one, Tensor)})
        extra = {name: one for name, one in own.items() if not isinstance(one, Tensor)}
        # "extra": the model's state dict besides tensors, by name. "param_groups": those of all optimizers,
        # with the "classes" of each, "params" by name, and "settings". "optimizer": the state of all
        # optimizers, by name of the parameter. "state": what the user gave.
        self.plain: dict[str, Any] = {"extra": encode(extra, EXTRA[:-1], self.tensors)}

    def add_optimizers(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        """Add the groups and the state of optimizers. A collective under FSDP1."""
        groups = [
            {
                "classes": optimizer_classes(optimizer),
                "params": [name for param in group["params"] for name in self.names[param]],
                "settings": {k: v for k, v in group.items() if k not in ("params", "param_names")},
            }
            for optimizer in optimizers
            for group in optimizer.param_groups
        ]
        found = [item for one in optimizers for item in self._state(model, one).items()]
        state = {self.first_name(name): dict(entries) for name, entries in found if entries}
        self.plain["param_groups"] = encode(groups, f"{OPTIMIZER}param_groups", self.tensors)
        self.plain["optimizer"] = encode(state, OPTIMIZER[:-1], self.tensors)

    def _state(self, model: nn.Module, optimizer: Optimizer) -> dict[str, dict[str, Any]]:
        """Return an optimizer's state of each parameter, by name. A collective under FSDP1.

        torch's get_optimizer_state_dict() would take a step to make a state that is not there yet.
        """
        if has_fsdp1(model):
            with in_parts(model):
                found = _as_dtensors(FSDP1.optim_state_dict(model, optimizer)["state"])
            return {plain_name(name): entries for name, entries in found.items()}
        params = [param for group in optimizer.param_groups for param in group["params"]]
        state = optimizer.state_dict()["state"]
        return {self.names[params[number]][0]: entries for number, entries in state.items()}

    def of_model(self) -> dict[str, Tensor]:
        """The model's tensors, by name."""
        return {key.removeprefix(MODEL): one for key, one in self.tensors.items() if key.startswith(MODEL)}

    def first_name(self, name: str) -> str:
        """The name under which a tied parameter is stored."""
        return self.tied.get(name, name)

    def named(self, names: Iterable[str]) -> tuple[str, ...]:
        """A group of parameters, by the names under which they are stored."""
        return tuple(sorted(map(self.first_name, names)))


def _as_dtensors(state: dict[str, Any]) -> dict[str, Any]:
    """View FSDP1's ShardedTensors as DTensors over the same memory; both shard the first dimension alike."""
    mesh_of = cache(DeviceMesh.from_group)  # to make one takes half a millisecond

    def convert(tensor: Any) -> DTensor:
        shape, dtype, device = tensor.size(), tensor.dtype, tensor.device
        shards = [shard.tensor for shard in tensor.local_shards()]
        return DTensor.from_local(
            shards[0] if shards else torch.empty((0, *shape[1:]), dtype=dtype, device=device),
            mesh_of(sharded_tensor_group(tensor), device.type),
            [Shard(0)],
            run_check=False,
            shape=shape,
            stride=torch.empty(shape, device="meta").stride(),
        )

    with quiet():
        return tree_map_only(ShardedTensor, convert, state)


# ---- optimizers --------------------------------------------------------------------------------------


def listed(optimizer: Optimizers | None) -> list[Optimizer]:
    """List the optimizers that were given, without Accelerate's wrappers."""
    given: Any = optimizer.values() if isinstance(optimizer, Mapping) else optimizer
    if given is None:
        return []
    found = list(given) if isinstance(given, Iterable) else [given]
    return [one.optimizer if type(one).__name__ == "AcceleratedOptimizer" else one for one in found]


def optimizer_classes(optimizer: Optimizer) -> list[str]:
    """Name the class of an optimizer and its base classes, without Optimizer itself."""
    return [one.__name__ for one in type(optimizer).__mro__[:-1] if one not in (Optimizer, object)]


@contextmanager
def in_parts(model: nn.Module) -> Iterator[None]:
    """Have FSDP1 give and take state dicts of which each rank has its parts."""
    kind, config = StateDictType.SHARDED_STATE_DICT, ShardedOptimStateDictConfig(offload_to_cpu=False)
    with quiet(), FSDP1.state_dict_type(model, kind, optim_state_dict_config=config):
        yield


# ---- names -------------------------------------------------------------------------------------------


def unwrapped(model: nn.Module, *, sharded: bool = True) -> nn.Module:
    """Strip the wrappers around a model that are modules of their own; or those alone that shard nothing."""
    while sharded or not isinstance(model, FSDP1 | FSDPModule):
        # A wrapper holds one module. Fabric's has the model under a second name.
        children = {name: child for name, child in model.named_children() if name != "_original_module"}
        replicas = isinstance(model, DistributedDataParallel | nn.DataParallel)
        if len(children) != 1 or not (replicas or children.keys() <= {*WRAPPED, "_forward_module"}):
            break
        (model,) = children.values()
    return model


def named_parameters(model: nn.Module) -> tuple[dict[nn.Parameter, list[str]], dict[str, str]]:
    """Map every parameter that an optimizer may hold to its name, or names (FSDP1's flat parameters).

    Returns:
        That map, and one of further names of tied parameters to the name in the first.
    """
    names: dict[nn.Parameter, list[str]] = {}
    tied: dict[str, str] = {}
    replicas = [f"{name}." for name, one in model.named_modules() if isinstance(one, DistributedDataParallel)]
    for raw, param in model.named_parameters(remove_duplicate=False):
        for unit in reversed(replicas):  # inner before outer
            raw = unit + raw.removeprefix(f"{unit}module.") if raw.startswith(unit) else raw
        flat, prefix = Flat(param), raw.removesuffix(FLAT_PARAM)
        here = [plain_name(prefix, name) for name in flat.names] or [plain_name(raw)]
        first = names.setdefault(param, here)
        tied |= {name: one for name, one in zip(here, first, strict=True) if name != one}
        # FSDP1 without use_orig_params has one flat parameter, which remembers what was tied.
        for info in flat.tied:
            alias = plain_name(prefix, info.module_name, info.param_name)
            tied[alias] = plain_name(prefix, info.prim_module_name, info.prim_param_name)
    return names, tied


def has_fsdp1(model: nn.Module) -> bool:
    return any(isinstance(module, FSDP1) for module in model.modules())


@contextmanager
def quiet() -> Iterator[None]:
    """Silence warnings of torch's FSDP1 code about torch's own deprecated calls."""
    calls = "ShardedTensor|FSDP.state_dict_type|_get_pg_default_device|Multiple backends are registered"
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=f".*({calls})")
        yield
