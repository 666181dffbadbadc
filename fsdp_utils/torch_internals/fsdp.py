"""The contents of FSDP1's and FSDP2's units; torch has no public access to them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from types import FrameType

    import torch
    from torch import Tensor, nn
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1

    from fsdp_utils.torch_internals.names import FlatParamHandle, FSDPParam, FSDPParamGroup


# FSDP1


def fsdp1_handle(module: FSDP1) -> FlatParamHandle | None:
    """The holder of the unit's parameters; None where all of them are in inner units."""
    return module._handle


def fsdp1_wrapped(module: FSDP1) -> nn.Module:
    """The module directly inside. FSDP1.module goes through a wrapper for checkpointing, too."""
    return module._fsdp_wrapped_module


def fsdp1_dtypes(handle: Any) -> tuple[torch.dtype, torch.dtype]:
    """The dtypes of the parameters at rest, and of the computation."""
    return handle._orig_param_dtype, handle._fwd_bwd_param_dtype


def fsdp1_backward_has_begun(handle: FlatParamHandle) -> bool:
    return getattr(handle, "_ran_pre_backward_hook", False)


def fsdp1_replicas(module: nn.Module) -> Any:
    """The process group over which a hybrid strategy averages replicas; None for all other modules."""
    return getattr(module, "_inter_node_pg", None)


def fsdp1_syncs(module: FSDP1) -> bool:
    """Whether backward reduces gradients: not within no_sync()."""
    return module._sync_gradients


def is_fsdp1_parameter(param: Tensor) -> bool:
    """Whether it is a flat parameter, or (with use_orig_params) a part of one."""
    return getattr(param, "_fsdp_flattened", False) or getattr(param, "_is_flat_param", False)


# What FSDP1's flat parameter keeps of the parameters inside, in their order there.
_OF_FLAT = {
    "names": "_fqns",  # within the unit
    "shapes": "_shapes",
    "strides": "_strides",  # before each was flattened, in the order of its memory
    "numels": "_numels",
    "shards": "_shard_param_infos",  # in_shard, offset_in_shard, numel_in_shard, intra_param_start_idx
    "params": "_params",  # its views, with use_orig_params
    "extensions": "_param_extensions",  # not None for each that was sharded already when FSDP1 wrapped it
    # for each further name: module_name, param_name, prim_module_name, prim_param_name
    "tied": "_shared_param_infos",
    "full_shape": "_unpadded_unsharded_size",  # gathered, without padding
    "shard_shape": "_sharded_size",  # a rank's part, with padding
}


class Flat:
    """FSDP1's flat parameter, with the attributes of _OF_FLAT; () for one that it lacks."""

    def __init__(self, flat: Any) -> None:
        self._flat = flat

    def __getattr__(self, name: str) -> Any:
        if name not in _OF_FLAT:
            raise AttributeError(name)
        found = getattr(self._flat, _OF_FLAT[name], None)
        return () if found is None else found


# FSDP2


def fsdp2_state(module: Any) -> Any:
    """FSDP2's state of a module under fully_shard; modules sharded together, as a list, share one."""
    return module._get_fsdp_state()


def fsdp2_groups(module: FSDPModule) -> list[FSDPParamGroup]:
    """The groups that hold the module's parameters."""
    state = fsdp2_state(module)
    if hasattr(state, "_fsdp_param_groups"):  # several from torch 2.12 on
        return list(state._fsdp_param_groups or [])
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def fsdp2_syncs(group: FSDPParamGroup) -> bool:
    """Whether backward reduces gradients, over shards and replicas; FSDPModule has setters only."""
    return group.reduce_grads and (group.all_reduce_grads or not group._is_hsdp)


def fsdp2_is_root(module: FSDPModule) -> bool:
    """Whether it is the outermost; before the first forward, no module is."""
    return bool(fsdp2_state(module)._is_root)


def fsdp2_whole(param: FSDPParam) -> Tensor | None:
    """The gathered parameter, after the first gather; its gradient is only there until it is reduced."""
    return getattr(param, "_unsharded_param", None)


def fsdp2_unit_of_frame(frame: FrameType) -> str | None:
    """The name of the unit that FSDP2 works for in this frame: "" for the root, None before forward."""
    return getattr(frame.f_locals.get("self"), "_module_fqn", None)
