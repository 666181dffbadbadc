"""Process groups: their store, which ones exist, time-outs, aborting, and fake ones."""

from __future__ import annotations

import importlib
from datetime import timedelta
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist


def default_store() -> dist.Store:
    """The store that init_process_group made. ProcessGroup.get_group_store() is another, with a prefix."""
    from torch.distributed import distributed_c10d

    return distributed_c10d._get_default_store()


def process_groups() -> list[dist.ProcessGroup]:
    """All process groups of this process; nothing public lists them."""
    from torch.distributed import distributed_c10d

    return list(distributed_c10d._world.pg_map)


def group_backend(group: dist.ProcessGroup, device: torch.device) -> Any:
    """The backend that runs the group's collectives on a device; its errors and time-out are only there."""
    return group._get_backend(device)


def abort_groups(group: dist.ProcessGroup | None = None) -> None:
    """Abort a group, or all: destroy_process_group waits for kernels, which wait for a rank that has died.

    The public ProcessGroup.abort leaves the group registered: the end of the program waits for it.
    """
    from torch.distributed import distributed_c10d

    distributed_c10d._abort_process_group(group)


def set_group_timeout(group: dist.ProcessGroup, seconds: float) -> None:
    """Set the time-out of a group's collectives."""
    from torch.distributed import distributed_c10d

    distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), group)


def fake_store() -> dist.Store:
    """For init_process_group("fake", ...), which this import registers; it takes fake tensors too."""
    import torch
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if not torch._C._dispatch_has_kernel_for_dispatch_key("c10d::_allgather_base_", "Meta"):
        # before torch 2.11 these are not registered with torch itself
        importlib.import_module("torch.distributed._tools.fake_collectives")
    return FakeStore()
