"""Wrap a model with FSDP2, block by block: so only a block or two hold full parameters at a time."""

from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel

from fsdp_utils.distributed.agreement import agree, has_peers
from fsdp_utils.sharding.blocks import separate, transformer_blocks
from fsdp_utils.sharding.checkpointing import compute_again
from fsdp_utils.sharding.local_part import is_readable, local

UNEVEN = 0.05  # A parameter that needs more padding than this is cut elsewhere


def shard(
    model: nn.Module,
    *,
    mesh: DeviceMesh | None = None,
    strategy: str = "full",
    mp_policy: MixedPrecisionPolicy | None = None,
    offload_policy: OffloadPolicy | None = None,
    checkpointing: Literal["full", "selective"] | int | None = None,
) -> nn.Module:
    """Call fully_shard on each transformer block, then on the model.

    Call it on all ranks, with the same model on each, and build the optimizer after it. A block that shares a
    parameter with another one or with the rest of the model stays in the root's unit, which is held in full
    for the whole step. Where embedding and head are large and your loss calls the head, give fully_shard the
    embedding, then [norm, head], before.

    A parameter is cut between rows if that gives each rank its share to within 5% of padding, else (8 experts
    on 32 ranks) along the first dimension that the ranks divide, which costs a copy at each all-gather. If
    there is none, it is padded; check_sharding says where that takes much memory.

    Args:
        model: changed in place.
        mesh: 1-D, or for "hybrid" 2-D with named dimensions (replicate, shard). None is all ranks.
        strategy: "full": parameters are freed after a block's forward and gathered again in backward.
            "grad_op": they stay until backward. "hybrid": as "full" within the mesh's second dimension,
            replicated over the first; all replicas get the first one's values, unless on the meta device.
        mp_policy: mixed precision, for every unit; output_dtype for the model's output alone.
        offload_policy: CPUOffloadPolicy(...), for every unit.
        checkpointing: compute activations of blocks again in backward, without a cache of keys and values.
            "full": of every block. "selective": keep the results of attention and of every other matrix
            product. n: of every n-th block. What a block counts in its buffers counts twice.

    Returns:
        The model. Each parameter is a DTensor now, with its full shape and its name.

    Raises:
        ValueError: the strategy is unknown or does not go with the mesh; the model has no transformer blocks
            or a scalar parameter, or FSDP1 or DDP has wrapped it; there is no process group. The model is
            unchanged then, and after a TypeError.
        TypeError: offload_policy is not an OffloadPolicy.
        RuntimeError: this torch is too old for gloo; or, on every rank, replicas hold other parameters and
            buffers (build the model anew then).

    Example::

        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        shard(model, mp_policy=policy)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        train_step(batch)
    """
    if strategy not in ("full", "grad_op", "hybrid"):
        raise ValueError(f'shard: expected strategy "full", "grad_op" or "hybrid", found {strategy!r}')
    if not isinstance(offload_policy, OffloadPolicy | None):  # True, for example, would offload nothing
        raise TypeError(f"shard: expected offload_policy to be a CPUOffloadPolicy, found {offload_policy!r}")
    mesh = _mesh(mesh, strategy)
    if any(isinstance(one, FullyShardedDataParallel | DistributedDataParallel) for one in model.modules()):
        raise ValueError("shard: expected a model without FSDP1 and DDP, found one that they have wrapped")
    if scalars := [name for name, parameter in model.named_parameters() if not parameter.dim()]:
        raise ValueError(
            f"shard: fully_shard doesn't support scalar parameters, found {scalars[0]}. Give it a dimension: "
            "torch.ones(1) in place of torch.tensor(1.0)."
        )
    blocks = list(transformer_blocks(model).values())
    ranks = mesh.size(mesh.ndim - 1)
    policy = mp_policy or MixedPrecisionPolicy()
    options: dict[str, Any] = {
        "mesh": mesh,
        "offload_policy": offload_policy or OffloadPolicy(),
        "shard_placement_fn": lambda p: None if isinstance(p, DTensor) else Shard(dimension(p.shape, ranks)),
    }
    of_blocks = {**options, "mp_policy": replace(policy, output_dtype=None)}
    if checkpointing is not None:
        compute_again(blocks, checkpointing)
    for block in separate(model, blocks):
        fully_shard(block, reshard_after_forward=strategy != "grad_op", **of_blocks)
    if strategy == "grad_op":
        options["reshard_after_forward"] = False  # else torch's default, which is the same for a root
    fully_shard(model, mp_policy=policy, **options)
    if strategy == "hybrid" and has_peers():
        _give_replicas_the_first_ones_values(model, mesh)
    return model


def padding(shape: Sequence[int], ranks: int) -> int:
    """Elements that FSDP2 adds, over all ranks, where it cuts between rows."""
    return -shape[0] % ranks * prod(shape[1:])


def dimension(shape: Sequence[int], ranks: int) -> int:
    """Choose the dimension to cut: 0 if that is almost even, else the first that the ranks divide, else 0.

    FSDP2 pads dimension 0 alone. Of the others the first has the longest contiguous pieces to copy.
    """
    if padding(shape, ranks) <= UNEVEN * prod(shape):
        return 0
    return next((dim for dim, size in enumerate(shape) if dim and size % ranks == 0), 0)


def _mesh(mesh: DeviceMesh | None, strategy: str) -> DeviceMesh:
    if (found := 1 if mesh is None else mesh.ndim) != (expected := 2 if strategy == "hybrid" else 1):
        raise ValueError(
            f'shard: strategy "{strategy}" expects a {expected}-D mesh, found a {found}-D one. For "hybrid": '
            "mesh=init_device_mesh(device_type, (hosts, ranks_per_host), "
            'mesh_dim_names=("replicate", "shard")).'
        )
    if mesh is None:
        # By the backend, as gloo ranks may run on a machine that has a GPU.
        accelerator = None if dist.get_backend() == "gloo" else torch.accelerator.current_accelerator()
        mesh = init_device_mesh("cpu" if accelerator is None else accelerator.type, (dist.get_world_size(),))
    # Source: https://github.com/pytorch/pytorch/issues/162338. Seen in torch 2.7.1 and 2.8.0, not in 2.9.1.
    if torch.__version__ < "2.9" and "gloo" in {str(dist.get_backend(one)) for one in mesh.get_all_groups()}:
        raise RuntimeError(
            "shard: on ranks that talk through gloo, FSDP2 expects torch 2.9 or later, found "
            f"{torch.__version__}. Its gloo adds gradients up where FSDP2 asks for their mean. Install a "
            "later torch, or train with FullyShardedDataParallel."
        )
    return mesh


@torch.no_grad()
def _give_replicas_the_first_ones_values(model: nn.Module, mesh: DeviceMesh) -> None:
    """Make replicas equal in parameters and buffers, as DDP does; those on meta have no values yet."""
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    alike = {name: f"{t.dtype} {list(t.shape)}{' on meta' * t.is_meta}" for name, t in named.items()}
    ranks = agree("shard", dict, error=RuntimeError, topic="sharding")
    with ranks.guard():
        ranks.same("", alike, cure=". Build the model alike on all ranks, or on meta on all.")
    for tensor in named.values():
        part, groups = local(tensor.detach()), [mesh.get_group(0)]
        if isinstance(tensor, DTensor):
            dims = [dim for dim, placement in enumerate(tensor.placements) if placement.is_replicate()]
            groups = [tensor.device_mesh.get_group(dim) for dim in dims]
        for group in groups if is_readable(part) else []:
            sent = part.to(mesh.device_type).contiguous()
            dist.broadcast(sent.view(-1).view(torch.uint8), group=group, group_src=0)  # gloo knows few dtypes
            part.copy_(sent)
