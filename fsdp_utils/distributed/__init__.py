"""Ranks: identity, starting some on this machine, agreement between them.

Above torch_internals and below all else: no other room is imported here.
"""

from typing import TYPE_CHECKING

from fsdp_utils._lazy import loader

if TYPE_CHECKING:
    from fsdp_utils.distributed.agreement import agree
    from fsdp_utils.distributed.identity import (
        get_local_rank,
        get_rank,
        get_world_size,
        rank0_first,
        sampler,
    )
    from fsdp_utils.distributed.launch import PRELOAD, run_on_ranks

_IDENTITY = ["get_local_rank", "get_rank", "get_world_size", "rank0_first", "sampler"]
__all__ = [
    "PRELOAD",
    "agree",
    "get_local_rank",
    "get_rank",
    "get_world_size",
    "rank0_first",
    "run_on_ranks",
    "sampler",
]
__getattr__ = loader(
    __name__,
    {
        "agree": "agreement",
        "PRELOAD": "launch",
        "run_on_ranks": "launch",
        **dict.fromkeys(_IDENTITY, "identity"),
    },
)
