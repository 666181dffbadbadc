"""Checkpoints with hashes: what is loaded is what was saved, or an error says why not.

`save_distributed` and `load_distributed` keep a run's state sharded in a directory, for any number of ranks;
`verify_checkpoint` compares files with their hashes. Tensors are in safetensors files, all else in JSON.
"""

from fsdp_utils.checkpoint.asynchronous import Save
from fsdp_utils.checkpoint.errors import (
    CheckpointDamagedError,
    CheckpointError,
    CheckpointNotFoundError,
)
from fsdp_utils.checkpoint.folder import checkpoints
from fsdp_utils.checkpoint.load import LoadedState, PerRank, load_distributed
from fsdp_utils.checkpoint.save import save_distributed
from fsdp_utils.checkpoint.verify import verify_checkpoint

__all__ = [
    "CheckpointDamagedError",
    "CheckpointError",
    "CheckpointNotFoundError",
    "LoadedState",
    "PerRank",
    "Save",
    "checkpoints",
    "load_distributed",
    "save_distributed",
    "verify_checkpoint",
]
