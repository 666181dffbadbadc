"""How long may a collective of a process group wait?"""

from datetime import timedelta
from typing import Any

import torch.distributed as dist


def set_group_timeout(group: dist.ProcessGroup, seconds: float) -> None:
    """From its next collective on.

    torch.distributed.set_timeout; before it was public (it is in torch 2.15), it had another name.
    """
    public = getattr(dist, "set_timeout", None)
    (public or dist.distributed_c10d._set_pg_timeout)(timedelta(seconds=seconds), group)


def gloo_timeout(group: dist.ProcessGroup) -> float | None:
    """Seconds that a gloo collective of the group may wait; None for a group without gloo."""
    backend = _gloo(group)
    return None if backend is None else backend.options._timeout.total_seconds()


def set_gloo_timeout(group: dist.ProcessGroup, seconds: float) -> None:
    """From the group's next gloo collective on; a backend of GPUs that the group also has keeps its own."""
    if (backend := _gloo(group)) is not None:
        backend._set_default_timeout(timedelta(seconds=seconds))


def _gloo(group: dist.ProcessGroup) -> Any:
    if not dist.is_gloo_available():
        return None
    for device in group._device_types:  # private, as torch's own setter of timeouts uses it
        backend = group._get_backend(device)
        if isinstance(backend, dist.ProcessGroupGloo):
            return backend
    return None
