"""Scalar parameters, which FSDP2 does not shard: each rank has them in full, and they stay equal."""

import weakref
from collections.abc import Collection

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh


def keep_equal(model: nn.Module, names: Collection[str], mesh: DeviceMesh) -> None:
    """Give all ranks the first rank's values, and average the gradients over the ranks in each backward.

    Args:
        model: after `fully_shard(..., ignored_params=...)`, on the ranks of the mesh.
        names: of its scalar parameters, each of shape ().
        mesh: over which the batch is split. On the meta device nothing is sent: whoever fills the parameters
            has to give them the same values on all ranks, as for replicas.
    """
    groups = mesh.get_all_groups()
    averaged: dict[str, weakref.ref[nn.Parameter]] = {}

    def average(parameter: nn.Parameter) -> None:
        grad = parameter.grad
        assert grad is not None  # the hook runs after it was accumulated
        for group in groups:
            dist.all_reduce(grad, group=group)
            grad /= group.size()

    def watch(*_: object) -> None:
        """Also later: to_empty makes other parameters, and what was frozen may train."""
        for name in names:
            parameter = model.get_parameter(name)
            seen = averaged.get(name)
            if parameter.requires_grad and (seen is None or seen() is not parameter):
                parameter.register_post_accumulate_grad_hook(average)
                averaged[name] = weakref.ref(parameter)

    for name in names:
        parameter = model.get_parameter(name)
        if not parameter.is_meta:
            parameter.data = parameter.data.to(mesh.device_type)  # fully_shard moves what it shards
            for group in groups:
                dist.broadcast(parameter.data, group=group, group_src=0)
    watch()
    model.register_forward_pre_hook(watch)
