"""What a checkpoint holds of a model and an optimizer: flat names and tensors.

torch.distributed.checkpoint.state_dict gives the tensors: under names that do not depend on the wrapper
(FSDP1, FSDP2, DDP, torch.compile), and sharded as the model is.
"""

import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from fsdp_utils.checkpoint.errors import CheckpointError
from fsdp_utils.checkpoint.user_state import holds_sharded
from fsdp_utils.sharding.names import plain_name
from fsdp_utils.torch_internals.fsdp import Flat, fsdp1_flat
from fsdp_utils.torch_internals.names import WRAPPED, ShardedTensor, get_param_to_fqns
from fsdp_utils.torch_internals.runtime import sharded_tensor_group

MODEL = "model."
OPTIMIZER = "optimizer.state."
# What is not a tensor is stored as the bytes of one: under this name, or with ".rank<r>" if it is rank r's.
PLAIN = "plain"

# What a save and a load take as `optimizer`: one, or several over different parameters.
Optimizers = Optimizer | Iterable[Optimizer] | Mapping[Any, Optimizer]


@dataclass
class Snapshot:
    """A model and an optimizer as flat names and tensors."""

    # by flat name, "model.<name>" and "optimizer.state.<parameter>.<what>"; sharded or whole
    tensors: dict[str, Tensor] = field(default_factory=dict)
    # what the model has besides tensors, by name
    extra: dict[str, Any] = field(default_factory=dict)
    optimizer: "OptimizerPlan | None" = None
    # name of a tensor that is left out -> the name under which it is there
    tied: dict[str, str] = field(default_factory=dict)
    # name of what the model has -> its name in torch's state dict, which may hold names of wrappers
    raw_names: dict[str, str] = field(default_factory=dict)
    # FSDP1's own sharded tensors, by name, over the memory of those in `tensors`
    originals: dict[str, ShardedTensor] = field(default_factory=dict)

    @classmethod
    def take(
        cls, model: nn.Module, optimizer: Optimizers | None = None, *, stateful: Sequence[bool] | None = None
    ) -> "Snapshot":
        """Take a snapshot, which shares the model's memory where it can. A collective under FSDP.

        Args:
            stateful: whether each optimizer has a state on any rank; the same on all ranks. None if all have.
        """
        with quiet():
            found = get_model_state_dict(model)
        flat = has_fsdp1(model)  # which cannot load under other names than it gives
        raw_names = {name if flat else plain_name(name): name for name in found}
        state = {name: found[raw] for name, raw in raw_names.items()}
        tied = tied_names(model)
        params = {name for names in parameter_names(model).values() for name in names}
        if hidden := sorted(params - state.keys()):
            raise CheckpointError(
                f"expected the parameter {hidden[0]!r} in the model's state dict, found "
                f"{sorted(state.keys() - tied.keys())[:3]}: torch leaves the name of a wrapper in where "
                "another one hides it. Put FSDP1 inside of torch.compile, and activation checkpointing "
                "inside of both and of DDP"
            )
        snapshot = cls(
            tied={alias: name for alias, name in tied.items() if alias in state}, raw_names=raw_names
        )
        meshes: dict[Any, DeviceMesh] = {}
        for name, value in state.items():
            if name in snapshot.tied:
                continue
            if isinstance(value, ShardedTensor):
                snapshot.originals[name] = value
            if isinstance(value, Tensor):
                snapshot.tensors[MODEL + name] = _common(value, meshes)
            else:
                snapshot.extra[name] = value
        plans = []
        for number, one in enumerate(listed(optimizer)):
            has_state = stateful is None or stateful[number]
            plan, tensors = OptimizerPlan.of(_optimizer_state(model, one, has_state))
            snapshot.tensors |= {key: _common(tensor, meshes) for key, tensor in tensors.items()}
            plans.append(plan)
        snapshot.optimizer = OptimizerPlan.joined(plans)
        return snapshot

    def first_name(self, name: str) -> str:
        """The name under which a tied tensor is stored."""
        return self.tied.get(name, name)

    def without(self, names: Collection[str]) -> dict[str, Tensor]:
        """The tensors, without some of the model's."""
        left_out = {MODEL + name for name in names}
        return {key: tensor for key, tensor in self.tensors.items() if key not in left_out}

    def take_extra(self, saved: dict[str, Any], *, strict: bool) -> None:
        """Take over what the checkpoint has besides tensors; if not strict, only what the model has too."""
        self.extra = saved if strict else {name: saved.get(name, own) for name, own in self.extra.items()}

    def leave_out(self, names: Collection[str]) -> None:
        """Forget tensors of the model."""
        self.tensors = self.without(names)
        self.tied = {alias: name for alias, name in self.tied.items() if name not in names}

    def gathered(self, rank: int) -> "Snapshot":
        """Gather full tensors in the CPU memory of rank 0, none on the others. A collective under FSDP."""
        tensors = {}
        for key, tensor in self.tensors.items():
            full = whole(tensor)
            if rank == 0:
                tensors[key] = full.detach().cpu()
        return replace(self, tensors=tensors, originals={})

    def nested(self) -> dict[str, Any]:
        """Nest the tensors as for plain DCP, which joins the keys to the same flat names."""
        model = {key.removeprefix(MODEL): t for key, t in self.tensors.items() if key.startswith(MODEL)}
        paths = self.optimizer.paths if self.optimizer else {}
        other = {key: t for key, t in self.tensors.items() if not key.startswith(MODEL) and key not in paths}
        optimizer = {"state": _tree((path, self.tensors[key]) for key, path in paths.items())}
        return {"model": model, **({"optimizer": optimizer} if paths else {}), **other}


@dataclass
class OptimizerPlan:
    """The state, without its tensors, of an optimizer or of several over different parameters."""

    groups: list[dict[str, Any]]  # param_groups, with the names of the parameters under "params"
    paths: dict[str, tuple[Any, ...]]  # flat name of a tensor -> (parameter, what, ...)
    plain: dict[tuple[Any, ...], Any]  # (parameter, what, ...) -> what is no tensor
    group_counts: list[int] = field(default_factory=list)  # of each of several optimizers; [] for one

    @classmethod
    def joined(cls, plans: "Sequence[OptimizerPlan]") -> "OptimizerPlan | None":
        """Join the plans of optimizers over different parameters; None for none."""
        if len(plans) <= 1:
            return plans[0] if plans else None
        whole = cls([], {}, {}, [len(plan.groups) for plan in plans])
        for plan in plans:
            whole.groups += plan.groups
            whole.paths |= plan.paths
            whole.plain |= plan.plain
        return whole

    def split(self) -> "list[OptimizerPlan]":
        """Take apart what joined() joined: a plan for each optimizer."""
        if not self.group_counts:
            return [self]
        groups = iter(self.groups)
        plans = [OptimizerPlan(list(islice(groups, count)), {}, {}) for count in self.group_counts]
        owners = {name: plan for plan in plans for group in plan.groups for name in group["params"]}
        for key, path in self.paths.items():
            owners.get(path[0], plans[0]).paths[key] = path
        for path, value in self.plain.items():
            owners.get(path[0], plans[0]).plain[path] = value
        return plans

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> "tuple[OptimizerPlan, dict[str, Tensor]]":
        """Take {"state": ..., "param_groups": ...} apart, as get_optimizer_state_dict gives it."""
        plan, tensors = cls(state.get("param_groups", []), {}, {}, state.get("group_counts", [])), {}
        for path, value in _leaves(state.get("state", {})):
            if not isinstance(value, Tensor) and holds_sharded(value):  # it would be stored as rank 0 has it
                raise CheckpointError(
                    f"optimizer state {path!r}: expected sharded tensors by name, found them in a "
                    f"{type(value).__name__}, which cannot be saved by parts"
                )
            if not isinstance(value, Tensor):
                plan.plain[path] = value
                continue
            flat = OPTIMIZER + ".".join(map(str, path))
            if flat in tensors:
                raise CheckpointError(f"two entries of the optimizer's state have the name {flat!r}")
            plan.paths[flat], tensors[flat] = path, value
        return plan, tensors

    def whole(self, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
        """Rebuild the state dict that of() took apart."""
        leaves = [*((path, tensors[key]) for key, path in self.paths.items()), *self.plain.items()]
        counts = {"group_counts": self.group_counts} if self.group_counts else {}
        return {"state": _tree(leaves), "param_groups": self.groups, **counts}


def _optimizer_state(model: nn.Module, optimizer: Optimizer, stateful: bool) -> Mapping[str, Any]:
    # Asked for a state that is not there yet, torch would take a step to make one: the run that is merely
    # saved would go on with another bias correction.
    if stateful:
        # Under FSDP1 a rank whose shard is all frozen has no state, but takes part in the collectives. An
        # empty entry, of a parameter of which other ranks have a state, keeps torch from the step.
        params = [param for group in optimizer.param_groups for param in group["params"]]
        added = [] if optimizer.state else [next((p for p in params if p.requires_grad), params[0])]
        for param in added:
            optimizer.state[param] = {}
        try:
            with quiet():
                found: Any = get_optimizer_state_dict(model, optimizer)
            return {
                "state": {plain_name(name): value for name, value in found["state"].items()},
                "param_groups": [
                    {**group, "params": [plain_name(name) for name in group["params"]]}
                    for group in found["param_groups"]
                ],
            }
        finally:
            for param in added:
                del optimizer.state[param]
    names = parameter_names(model)
    groups = [
        {**group, "params": [name for param in group["params"] for name in names[param]]}
        for group in optimizer.param_groups
    ]
    return {"state": {}, "param_groups": groups}


def whole(tensor: Tensor) -> Tensor:
    """Gather a full tensor. A collective of the ranks that share it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _common(tensor: Tensor, meshes: dict[Any, DeviceMesh]) -> Tensor:
    """View FSDP1's ShardedTensor as a DTensor over the same memory; both shard the first dimension alike."""
    if not isinstance(tensor, ShardedTensor):
        return tensor
    with quiet():
        shape, dtype, device = tensor.size(), tensor.dtype, tensor.device
        shards = [shard.tensor for shard in tensor.local_shards()]
        group = sharded_tensor_group(tensor)
    if group not in meshes:
        meshes[group] = DeviceMesh.from_group(group, device.type)
    return DTensor.from_local(
        shards[0] if shards else torch.empty((0, *shape[1:]), dtype=dtype, device=device),
        meshes[group],
        [Shard(0)],
        run_check=False,
        shape=shape,
        stride=torch.empty(shape, device="meta").stride(),
    )


def _leaves(tree: Mapping[Any, Any], path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, (*path, key))
        else:
            yield (*path, key), value


def _tree(leaves: Iterable[tuple[tuple[Any, ...], Any]]) -> dict[Any, Any]:
    tree: dict[Any, Any] = {}
    for path, value in leaves:
        place = tree
        for key in path[:-1]:
            place = place.setdefault(key, {})
        place[path[-1]] = value
    return tree


# ---- names ------------------------------------------------------------------------------------------


def _inner(module: object) -> tuple[str, nn.Module] | None:
    """The module inside of a wrapper, under the name that it has there; None if this is no wrapper.

    Wrappers are DDP, FSDP1, activation checkpointing, torch.compile and Lightning Fabric's.
    """
    if isinstance(module, DistributedDataParallel | nn.DataParallel):
        return "module", module.module
    children = dict(module.named_children()) if isinstance(module, nn.Module) else {}
    return next(((name, children[name]) for name in (*WRAPPED, "_forward_module") if name in children), None)


def without_unsharded_wrappers(model: nn.Module) -> nn.Module:
    """Strip the wrappers around a model that shard nothing.

    What is inside has the same names, whichever of them are around it and in which order.
    """
    while not isinstance(model, FSDP1 | FSDPModule) and (inner := _inner(model)) is not None:
        model = inner[1]
    return model


def unwrapped(model: nn.Module) -> nn.Module:
    """Strip all wrappers around a model that are modules of their own."""
    while (inner := _inner(model)) is not None:
        model = inner[1]
    return model


def listed(optimizer: Optimizers | None) -> list[Optimizer]:
    """List the optimizers that were given."""
    if optimizer is None:
        return []
    if isinstance(optimizer, Mapping):
        return list(optimizer.values())
    single = isinstance(optimizer, Optimizer) or not isinstance(optimizer, Iterable)
    return [optimizer] if single else list(optimizer)  # type: ignore[list-item]


def optimizer_classes(optimizer: Optimizer) -> list[str]:
    """class_names() of an optimizer, or of the one inside Accelerate's wrapper."""
    while isinstance(inner := getattr(optimizer, "optimizer", None), Optimizer):  # Accelerate's wrapper
        optimizer = inner
    return class_names(type(optimizer))


def recorded_classes(optimizers: Sequence[Optimizer]) -> list[Any]:
    """What a checkpoint records: optimizer_classes() of the one, or a list of that for several."""
    classes = [optimizer_classes(one) for one in optimizers]
    return classes if len(classes) > 1 else [name for one in classes for name in one]


def class_names(kind: type) -> list[str]:
    """Name a class of optimizers and its base classes, without Optimizer itself."""
    classes = [one for one in kind.__mro__ if issubclass(one, Optimizer) and one is not Optimizer]
    return [one.__name__ for one in classes]


def parameter_names(model: nn.Module) -> dict[nn.Parameter, list[str]]:
    """Map every parameter that an optimizer may hold to its name, or names (FSDP1's flat parameters)."""
    return {
        param: [clean_name(model, name) for name in names]
        for param, names in get_param_to_fqns(model).items()
    }


def tied_names(model: nn.Module) -> dict[str, str]:
    """Map further names of tied parameters to their first name."""
    first: dict[int, str] = {}
    tied = {}
    for raw_name, param in model.named_parameters(remove_duplicate=False):
        name = clean_name(model, raw_name)
        if (earlier := first.setdefault(id(param), name)) != name:
            tied[name] = earlier
    for path, module in model.named_modules():
        # FSDP1 without use_orig_params has one flat parameter, which remembers what was tied.
        flat = fsdp1_flat(module) if isinstance(module, FSDP1) else None
        for info in Flat(flat).tied:
            name, earlier = (
                clean_name(model, ".".join(filter(None, (path, *inner))))
                for inner in (
                    (info.module_name, info.param_name),
                    (info.prim_module_name, info.prim_param_name),
                )
            )
            tied[name] = earlier
    return tied


def frozen_names(model: nn.Module) -> list[str]:
    """List the names of parameters that need no gradient, further names of tied ones included."""
    frozen = {
        name for param, names in parameter_names(model).items() for name in names if not param.requires_grad
    }
    return sorted(frozen | {alias for alias, name in tied_names(model).items() if name in frozen})


def clean_name(model: nn.Module, name: str) -> str:
    """Strip what wrappers add to a name, also wrappers of a part of the model."""
    module: object = model
    parts = []
    for part in name.split("."):
        inner = _inner(module)
        while inner is not None and inner[0] != part:  # a wrapper that the name leaves out
            module = inner[1]
            inner = _inner(module)
        if inner is None:
            parts.append(part)
            module = getattr(module, part, None)
        else:
            module = inner[1]
    return plain_name(*parts)


def has_fsdp1(model: nn.Module) -> bool:
    return any(isinstance(module, FSDP1) for module in model.modules())


@contextmanager
def quiet() -> Iterator[None]:
    """Silence warnings of torch's FSDP1 code about torch's own deprecated calls."""
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", category=FutureWarning, message=".*(ShardedTensor|FSDP.state_dict_type)"
        )
        warnings.filterwarnings("ignore", category=UserWarning, message=".*_get_pg_default_device")
        warnings.filterwarnings("ignore", category=UserWarning, message="Multiple backends are registered")
        yield
