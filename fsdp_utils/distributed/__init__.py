"""Ranks: identity, starting some on this machine, agreement between them.

Above torch_internals and below all else: no other room is imported here.
"""

from fsdp_utils.distributed.agreement import agree
from fsdp_utils.distributed.identity import get_local_rank, get_rank, get_world_size, rank0_first, sampler
from fsdp_utils.distributed.launch import run_on_ranks

__all__ = [
    "agree",
    "get_local_rank",
    "get_rank",
    "get_world_size",
    "rank0_first",
    "run_on_ranks",
    "sampler",
]
