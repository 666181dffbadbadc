"""Sharded tensors among the plain state: an average of the weights, the state of a second optimizer.

Plain data is stored as rank 0 has it, which of a sharded tensor is one part. So DTensors are taken out of
the state before it is compared and packed, saved as the model's are, and put back when it is loaded.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor import empty as empty_dtensor

from fsdp_utils.checkpoint.errors import CheckpointError
from fsdp_utils.checkpoint.pickled import check_key
from fsdp_utils.checkpoint.plain_data import PerRank
from fsdp_utils.torch_internals.names import ShardedTensor

STATE = "state."

# Flat name of a tensor -> its path in the state, and the dimension that each dimension of its mesh shards
# (None: replicated).
Places = dict[str, tuple[tuple[Any, ...], list[int | None]]]


@dataclass
class StateToSave:
    """The state that save_distributed or save_full was given, taken apart by take_out()."""

    given: Mapping[str, Any]
    plain: dict[str, Any] = field(default_factory=dict)  # with None instead of DTensors
    tensors: dict[str, Tensor] = field(default_factory=dict)  # the DTensors, by flat name
    places: Places = field(default_factory=dict)

    def take_out(self) -> None:
        """Take the DTensors out.

        Raises:
            CheckpointError: a tensor is sharded in a way that cannot be saved here.
        """
        self.plain, self.tensors, self.places = _without(self.given)


def _without(state: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Tensor], Places]:
    tensors: dict[str, Tensor] = {}
    places: Places = {}

    def without(value: Any, path: tuple[Any, ...]) -> Any:
        if isinstance(value, DTensor):
            key = STATE + ".".join(map(str, path))
            if key in tensors:
                raise CheckpointError(f"two sharded tensors in the state have the name {key!r}")
            tensors[key], places[key] = value.detach(), (path, _sharded_dims(value, path))
            return None
        if isinstance(value, ShardedTensor):
            raise CheckpointError(
                f"state {_place(path)}: expected a whole tensor or a DTensor, found a ShardedTensor of "
                "FSDP1, of which each rank has one part. Gather it first, or use FSDP2 (fully_shard)"
            )
        if not holds_sharded(value):
            return value
        if isinstance(value, Mapping):
            return {key: without(part, (*path, key)) for key, part in value.items()}
        return type(value)(without(part, (*path, index)) for index, part in enumerate(value))

    return {name: without(value, (name,)) for name, value in state.items()}, tensors, places


def put_back(state: dict[str, Any], tensors: Mapping[str, Tensor], places: Places) -> dict[str, Any]:
    """The state with the tensors where StateToSave.take_out() found them.

    Raises:
        CheckpointError: the state has no such place.
    """

    def put(value: Any, path: tuple[Any, ...], tensor: Tensor) -> Any:
        if isinstance(value, PerRank):
            return PerRank(put(part, path, tensor) for part in value)
        if not path:
            return tensor
        if isinstance(value, Mapping):
            return {**value, path[0]: put(value[path[0]], path[1:], tensor)}
        if not isinstance(value, list | tuple) or path[0] not in range(len(value)):
            raise TypeError(f"a {type(value).__name__}")
        return type(value)(
            put(part, path[1:], tensor) if index == path[0] else part for index, part in enumerate(value)
        )

    key = ""
    try:
        for key, (path, _) in places.items():
            check_key(path)  # forged, its hash might take without end
            if not path:
                raise TypeError("no path")
            state = put(state, path, tensors[key])
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"expected a place in the saved state for {key!r:.200}, found {type(error).__name__}: "
            f"{error!s:.200}: the checkpoint is damaged or forged"
        ) from error
    return state


def buffers_for(
    places: Places, specs: Mapping[str, tuple[torch.dtype, torch.Size]], model: nn.Module
) -> dict[str, Tensor]:
    """A tensor to load each into: sharded over the model's mesh as it was over its own, or whole.

    It is whole where no parameter of the model is a DTensor, or the model's mesh has fewer dimensions than
    were sharded.
    """
    mesh = next((param.device_mesh for param in model.parameters() if isinstance(param, DTensor)), None)
    buffers = {}
    for key, (_, dims) in places.items():
        dtype, shape = specs[key]
        while dims and dims[0] is None:  # replicated, as by hybrid sharding
            dims = dims[1:]
        if mesh is None or len(dims) > mesh.ndim:
            buffers[key] = torch.empty(shape, dtype=dtype)
            continue
        placements: list[Placement] = [Replicate()] * (mesh.ndim - len(dims))
        placements += [Replicate() if dim is None else Shard(dim) for dim in dims]
        buffers[key] = empty_dtensor(shape, dtype=dtype, device_mesh=mesh, placements=placements)
    return buffers


def _sharded_dims(tensor: DTensor, path: tuple[Any, ...]) -> list[int | None]:
    for placement in tensor.placements:
        if type(placement) not in (Shard, Replicate):  # Partial, or FSDP2's over tensor parallel
            raise CheckpointError(
                f"state {_place(path)}: expected a DTensor with placements Shard and Replicate, found "
                f"{placement}. Save its full_tensor()"
            )
    return [placement.dim if isinstance(placement, Shard) else None for placement in tensor.placements]


def holds_sharded(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(holds_sharded, value.values()))
    if isinstance(value, list | tuple):
        return any(map(holds_sharded, value))
    return isinstance(value, DTensor | ShardedTensor)


def _place(path: tuple[Any, ...]) -> str:
    return repr(path[0]) + "".join(f"[{key!r}]" for key in path[1:])
