"""Bounds how long a save or a load waits in the collectives of the model's own process groups.

FSDP1 gathers its state over the groups that the training uses, and DTensors over those of their mesh. A rank
that fails before such a collective leaves the others in it until the group's own timeout: half an hour with
gloo.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1
from torch.distributed.tensor import DTensor

from fsdp_utils.torch_internals.groups import gloo_timeout, set_gloo_timeout


@contextmanager
def limited(model: nn.Module, seconds: float) -> Iterator[None]:
    """Inside, a rank waits that long at most for another one in a gloo collective of the model's groups.

    A group whose collective has run out of time cannot be used any more; gloo closes its connections.

    NCCL's groups keep their own timeout (10 minutes by default): when it is over, NCCL's watchdog ends the
    process, and a large job may need long for the first collective of a group.
    """
    before = {group: timeout for group in _groups(model) if (timeout := gloo_timeout(group)) is not None}
    for group in before:
        set_gloo_timeout(group, seconds)
    try:
        yield
    finally:
        for group, timeout in before.items():
            set_gloo_timeout(group, timeout)


def _groups(model: nn.Module) -> set[dist.ProcessGroup]:
    """The groups over which the model's parts may be gathered."""
    if not (dist.is_available() and dist.is_initialized()):
        return set()
    groups: set[dist.ProcessGroup | None] = {dist.group.WORLD}  # of hybrid sharding's optimizer state
    groups |= {module.process_group for module in model.modules() if isinstance(module, FSDP1)}
    meshes = {tensor.device_mesh for tensor in model.parameters() if isinstance(tensor, DTensor)}
    groups |= {group for mesh in meshes for group in mesh.get_all_groups()}
    return {group for group in groups if isinstance(group, dist.ProcessGroup)}
