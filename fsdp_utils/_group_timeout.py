"""How long may a collective of a process group wait?"""

from datetime import timedelta

import torch.distributed as dist


def set_group_timeout(group: dist.ProcessGroup, seconds: float) -> None:
    """From its next collective on.

    torch.distributed.set_timeout; before it was public (it is in torch 2.15), it had another name.
    """
    public = getattr(dist, "set_timeout", None)
    (public or dist.distributed_c10d._set_pg_timeout)(timedelta(seconds=seconds), group)
