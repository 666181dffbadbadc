"""What is to be saved, as flat names and tensors.

torch.distributed.checkpoint.state_dict gives the tensors: under names that do not depend on the wrapper
(FSDP1,
FSDP2, DDP, torch.compile), and sharded as the model is.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.optim import Optimizer

from fsdp_utils.checkpoint.errors import CheckpointError
from fsdp_utils.checkpoint.names import parameter_names, quiet, tied_names
from fsdp_utils.checkpoint.sharded_state import holds_sharded
from fsdp_utils.torch_internals.names import ShardedTensor
from fsdp_utils.torch_internals.runtime import sharded_tensor_group

MODEL = "model."
OPTIMIZER = "optimizer.state."
# What is not a tensor is stored as the bytes of one: under this name, or with ".rank<r>" if it is rank r's.
PLAIN = "plain"


@dataclass
class Snapshot:
    """A model and an optimizer as a checkpoint sees them."""

    # by flat name, "model.<name>" and "optimizer.state.<parameter>.<what>"; sharded or whole
    tensors: dict[str, Tensor] = field(default_factory=dict)
    # what the model has besides tensors, by name
    extra: dict[str, Any] = field(default_factory=dict)
    optimizer: "OptimizerPlan | None" = None
    # name of a tensor that is left out -> the name under which it is there
    tied: dict[str, str] = field(default_factory=dict)
    # FSDP1's own sharded tensors, by name, over the memory of those in `tensors`
    originals: dict[str, ShardedTensor] = field(default_factory=dict)

    @classmethod
    def take(
        cls, model: nn.Module, optimizer: Optimizer | None = None, *, stateful: bool = True
    ) -> "Snapshot":
        """Look at them. A collective under FSDP.

        Args:
            stateful: whether the optimizer has a state on any rank; the same on all ranks.
        """
        with quiet():
            state = get_model_state_dict(model)
        snapshot = cls(tied={alias: name for alias, name in tied_names(model).items() if alias in state})
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
        if optimizer is not None:
            snapshot.optimizer, tensors = OptimizerPlan.of(_optimizer_state(model, optimizer, stateful))
            snapshot.tensors |= {key: _common(tensor, meshes) for key, tensor in tensors.items()}
        return snapshot

    def first_name(self, name: str) -> str:
        """The name under which a tensor is there."""
        return self.tied.get(name, name)

    def gathered(self, rank: int) -> "Snapshot":
        """With whole tensors in the CPU memory of rank 0, and none on the others. A collective under FSDP."""
        tensors = {}
        for key, tensor in self.tensors.items():
            full = whole(tensor)
            if rank == 0:
                tensors[key] = full.detach().cpu()
        return replace(self, tensors=tensors, originals={})

    def nested(self) -> dict[str, Any]:
        """The tensors as plain DCP would be given them (it joins the keys to the same flat names)."""
        model = {key.removeprefix(MODEL): t for key, t in self.tensors.items() if key.startswith(MODEL)}
        paths = self.optimizer.paths if self.optimizer else {}
        other = {key: t for key, t in self.tensors.items() if not key.startswith(MODEL) and key not in paths}
        optimizer = {"state": _tree((path, self.tensors[key]) for key, path in paths.items())}
        return {"model": model, **({"optimizer": optimizer} if paths else {}), **other}


@dataclass
class OptimizerPlan:
    """An optimizer's state without its tensors."""

    groups: list[dict[str, Any]]  # param_groups, with the names of the parameters under "params"
    paths: dict[str, tuple[Any, ...]]  # flat name of a tensor -> (parameter, what, ...)
    plain: dict[tuple[Any, ...], Any]  # (parameter, what, ...) -> what is no tensor

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> "tuple[OptimizerPlan, dict[str, Tensor]]":
        """Take {"state": ..., "param_groups": ...} apart, as get_optimizer_state_dict gives it."""
        plan, tensors = cls(state.get("param_groups", []), {}, {}), {}
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
        """Put it together again."""
        leaves = [*((path, tensors[key]) for key, path in self.paths.items()), *self.plain.items()]
        return {"state": _tree(leaves), "param_groups": self.groups}


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
                return get_optimizer_state_dict(model, optimizer)
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
    """All of a tensor. A collective of the ranks that share it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _common(tensor: Tensor, meshes: dict[Any, DeviceMesh]) -> Tensor:
    """FSDP1's ShardedTensor as a DTensor over the same memory; both cut the first dimension alike."""
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
