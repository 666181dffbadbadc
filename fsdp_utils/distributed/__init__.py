"""Ranks: identity, starting some on this machine, agreement between them, recovery from their failures.

Above torch.distributed and below everything else: no other room is imported here.
"""

from typing import TYPE_CHECKING

from fsdp_utils._lazy import loader

if TYPE_CHECKING:
    from fsdp_utils.distributed.identity import (
        get_local_rank,
        get_node_rank,
        get_rank,
        get_world_size,
        rank0_first,
        sampler,
    )
    from fsdp_utils.distributed.launch import run_on_ranks

__all__ = [
    "get_local_rank",
    "get_node_rank",
    "get_rank",
    "get_world_size",
    "rank0_first",
    "run_on_ranks",
    "sampler",
]
_MODULE_OF = {
    "get_local_rank": "identity",
    "get_node_rank": "identity",
    "get_rank": "identity",
    "get_world_size": "identity",
    "rank0_first": "identity",
    "run_on_ranks": "launch",
    "sampler": "identity",
}
__getattr__ = loader(__name__, _MODULE_OF)
