"""Collect a model, its optimizers and the user's state: tensors by key, and the rest as JSON.

torch's get_model_state_dict() gives the model. Its get_optimizer_state_dict() is not used: it takes a step
where there is no state yet, and what it gives cannot be set where a group is empty or a parameter has none.
"""

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
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

from fsdp_utils.checkpoint.codec import encode
from fsdp_utils.checkpoint.errors import CheckpointError
from fsdp_utils.sharding.names import plain_name
from fsdp_utils.torch_internals.fsdp import Flat, fsdp1_flat, fsdp1_handle
from fsdp_utils.torch_internals.names import WRAPPED, ShardedTensor, get_param_to_fqns
from fsdp_utils.torch_internals.runtime import own_children, sharded_tensor_group

# What the keys of tensors begin with.
MODEL, EXTRA, OPTIMIZER, STATE, PER_RANK = "model.", "extra.model.", "optimizer.", "state.", "per_rank."
# What a save and a load take as `optimizer`: one, or several over different parameters.
Optimizers = Optimizer | Iterable[Optimizer] | Mapping[Any, Optimizer]


@dataclass
class Held:
    """The tensors of a model, its optimizers and the state by key, and the rest as codec.encode() has it.

    `plain` has "extra" (the model's state dict besides tensors, by name), "optimizers" (of each its "classes"
    and its "groups", with their "params" by name and their "settings"), "optimizer" (their state, by name of
    the parameter), "state", and "dims" (by key of each DTensor in the state the dimension that each dimension
    of its mesh shards, None where it is replicated).
    """

    tensors: dict[str, Tensor]
    plain: dict[str, Any]
    tied: dict[str, str]  # name of a parameter that is left out -> the name under which it is there
    # The model's state dict as torch gives it, over the memory of `tensors`, and its names by those of here.
    state_dict: dict[str, Any]
    raw_names: dict[str, str]

    @classmethod
    def of(cls, model: nn.Module) -> "Held":
        """Collect a model's state dict, under names without wrappers. A collective under FSDP1."""
        with quiet():
            found = get_model_state_dict(model)
        flat = has_fsdp1(model)  # which cannot load under other names than torch gives
        raw_names = {raw if flat else plain_name(raw): raw for raw in found}
        params = {name for some in parameter_names(model).values() for name in some}
        if odd := sorted(params - raw_names.keys()):
            raise CheckpointError(
                f"expected one entry {odd[0]!r} in the model's state dict, found none of that name without "
                "those of wrappers. Rename the module; or put FSDP1 inside of torch.compile, and activation "
                "checkpointing inside of both"
            )
        tied = {alias: name for alias, name in tied_names(model).items() if alias in raw_names}
        own = {name: found[raw] for name, raw in raw_names.items() if name not in tied}
        tensors = _as_dtensors({MODEL + name: one for name, one in own.items() if isinstance(one, Tensor)})
        extra = {name: one for name, one in own.items() if not isinstance(one, Tensor)}
        plain = {"extra": encode(extra, EXTRA[:-1], tensors), "optimizers": [], "optimizer": {}, "dims": {}}
        return cls(tensors, plain, tied, found, raw_names)

    def add_optimizers(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        """Add the groups and the state of optimizers. A collective under FSDP1."""
        state: dict[str, Any] = {}
        saved = []
        for optimizer in optimizers:
            groups = [
                {"params": params, "settings": _settings(group)}
                for params, group in zip(self.groups(model, optimizer), optimizer.param_groups, strict=True)
            ]
            saved.append({"classes": optimizer_classes(optimizer), "groups": groups})
            for name, entries in _state(model, optimizer).items():
                state |= {self.first_name(name): _as_dtensors(entries)} if entries else {}
        self.plain["optimizers"] = encode(saved, f"{OPTIMIZER}groups", self.tensors)
        self.plain["optimizer"] = encode(state, OPTIMIZER[:-1], self.tensors)

    def add_state(self, values: Mapping[str, Any]) -> None:
        """Add the user's state: plain values and tensors, by name."""
        tensors: dict[str, Tensor] = {}
        self.plain["state"] = encode(dict(values), STATE[:-1], tensors)
        for key, tensor in tensors.items():
            if isinstance(tensor, DTensor):
                # FSDP2 over tensor parallelism has another placement, which shards a dimension too.
                self.plain["dims"][key] = [getattr(one, "dim", None) for one in tensor.placements]
        self.tensors |= tensors

    def groups(self, model: nn.Module, optimizer: Optimizer) -> list[list[str]]:
        """List the names of the parameters of each group, sorted."""
        names = parameter_names(model)
        return [
            sorted(self.first_name(name) for param in group["params"] for name in names[param])
            for group in optimizer.param_groups
        ]

    def of_model(self) -> dict[str, Tensor]:
        """The model's tensors, by name."""
        return {key.removeprefix(MODEL): one for key, one in self.tensors.items() if key.startswith(MODEL)}

    def first_name(self, name: str) -> str:
        """The name under which a tied parameter is stored."""
        return self.tied.get(name, name)


def specs(tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Any]]:
    """Describe tensors for the manifest."""
    return {
        key: {"dtype": str(one.dtype).removeprefix("torch."), "shape": list(one.shape)}
        for key, one in tensors.items()
    }


def _as_dtensors(entries: Mapping[str, Any]) -> dict[str, Any]:
    """View FSDP1's ShardedTensors as DTensors over the same memory; both shard the first dimension alike."""
    found, meshes = dict(entries), {}
    for name, tensor in entries.items():
        if not isinstance(tensor, ShardedTensor):
            continue
        with quiet():
            shape, device, group = tensor.size(), tensor.device, sharded_tensor_group(tensor)
            shards = [shard.tensor for shard in tensor.local_shards()]
            empty = torch.empty((0, *shape[1:]), dtype=tensor.dtype, device=device)
        if group not in meshes:
            meshes[group] = DeviceMesh.from_group(group, device.type)
        stride = torch.empty(shape, device="meta").stride()
        found[name] = DTensor.from_local(
            (*shards, empty)[0], meshes[group], [Shard(0)], run_check=False, shape=shape, stride=stride
        )
    return found


# ---- optimizers --------------------------------------------------------------------------------------


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name not in ("params", "param_names")}


def listed(optimizer: Optimizers | None) -> list[Optimizer]:
    """List the optimizers that were given."""
    if optimizer is None:
        return []
    if isinstance(optimizer, Mapping):
        return list(optimizer.values())
    single = isinstance(optimizer, Optimizer) or not isinstance(optimizer, Iterable)
    return [optimizer] if single else list(optimizer)  # type: ignore[list-item]


def optimizer_classes(optimizer: Optimizer) -> list[str]:
    """Name the class of an optimizer and its base classes, without Optimizer itself."""
    while isinstance(inner := getattr(optimizer, "optimizer", None), Optimizer):  # Accelerate's wrapper
        optimizer = inner
    return [one.__name__ for one in type(optimizer).__mro__[:-1] if one not in (Optimizer, object)]


def _state(model: nn.Module, optimizer: Optimizer) -> dict[str, dict[str, Any]]:
    """Return an optimizer's state of each parameter, by name. A collective under FSDP1."""
    if has_fsdp1(model):
        with in_parts(model):
            found = FSDP1.optim_state_dict(model, optimizer)["state"]
        return {plain_name(name): entries for name, entries in found.items()}
    names = parameter_names(model)
    params = [param for group in optimizer.param_groups for param in group["params"]]
    return {names[params[number]][0]: one for number, one in optimizer.state_dict()["state"].items()}


@contextmanager
def in_parts(model: nn.Module) -> Iterator[None]:
    """Have FSDP1 give and take state dicts of which each rank has its parts."""
    kind, config = StateDictType.SHARDED_STATE_DICT, ShardedOptimStateDictConfig(offload_to_cpu=False)
    with quiet(), FSDP1.state_dict_type(model, kind, optim_state_dict_config=config):
        yield


# ---- wrappers and names ------------------------------------------------------------------------------


def unwrapped(model: nn.Module, *, of_fsdp: bool = True) -> nn.Module:
    """Strip the wrappers around a model: DDP, FSDP1, checkpointing, compile, Fabric.

    Args:
        of_fsdp: False stops at what FSDP shards.
    """
    while of_fsdp or not isinstance(model, FSDP1 | FSDPModule):
        wraps = isinstance(model, DistributedDataParallel | nn.DataParallel)
        children = own_children(model)
        names = (*WRAPPED, "_forward_module", *["module"] * wraps)
        inner = next((child for name in names if (child := children.get(name)) is not None), None)
        if inner is None:
            break
        model = inner
    return model


def check_wrappers(model: nn.Module) -> None:
    """Refuse DDP inside of a model, and FSDP1 over tensor parallelism, whose state dicts lose something."""
    for unit in model.modules():
        handle = fsdp1_handle(unit) if isinstance(unit, FSDP1) else None
        tensor_parallel = handle is not None and any(Flat(handle.flat_param).extensions)
        if tensor_parallel or isinstance(unit, DistributedDataParallel):
            found = "FSDP1 over tensor-parallel parameters" if tensor_parallel else "DDP inside of it"
            raise CheckpointError(
                f"expected a model in FSDP2, FSDP1 or DDP as a whole, found {found}. Use FSDP2 (fully_shard)"
            )


def parameter_names(model: nn.Module) -> dict[nn.Parameter, list[str]]:
    """Map every parameter that an optimizer may hold to its name, or names (FSDP1's flat parameters)."""
    return {param: list(map(plain_name, names)) for param, names in get_param_to_fqns(model).items()}


def tied_names(model: nn.Module) -> dict[str, str]:
    """Map further names of tied parameters to their first name."""
    first: dict[nn.Parameter, str] = {}
    tied = {}
    for raw, param in model.named_parameters(remove_duplicate=False):
        name = plain_name(raw)
        if (earlier := first.setdefault(param, name)) != name:
            tied[name] = earlier
    for path, module in model.named_modules():
        # FSDP1 without use_orig_params has one flat parameter, which remembers what was tied.
        for info in Flat(fsdp1_flat(module)).tied if isinstance(module, FSDP1) else ():
            alias = plain_name(path, info.module_name, info.param_name)
            tied[alias] = plain_name(path, info.prim_module_name, info.prim_param_name)
    return tied


def has_fsdp1(model: nn.Module) -> bool:
    return any(isinstance(module, FSDP1) for module in model.modules())


@contextmanager
def quiet() -> Iterator[None]:
    """Silence warnings of torch's FSDP1 code about torch's own deprecated calls."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*(ShardedTensor|FSDP.state_dict_type)", FutureWarning)
        warnings.filterwarnings("ignore", ".*_get_pg_default_device|Multiple backends", UserWarning)
        yield
