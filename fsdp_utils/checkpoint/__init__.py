"""Checkpoints that survive: what is loaded is what was saved, or an error says why not."""

from fsdp_utils.checkpoint.errors import CheckpointError
from fsdp_utils.checkpoint.full import load_full, save_full
from fsdp_utils.checkpoint.load import load_distributed
from fsdp_utils.checkpoint.plain import PerRank
from fsdp_utils.checkpoint.save import save_distributed

__all__ = [
    "CheckpointError",
    "PerRank",
    "load_distributed",
    "load_full",
    "save_distributed",
    "save_full",
]
