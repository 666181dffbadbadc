"""Checkpoints with hashes: what is loaded is what was saved, or an error says why not.

`save_distributed` and `load_distributed` keep a run's state sharded in a directory, for any number of
ranks; `save_full` and `load_full` in one file; `verify_checkpoint` holds files against their hashes.
"""

from typing import TYPE_CHECKING

from fsdp_utils._lazy import loader

if TYPE_CHECKING:
    from fsdp_utils.checkpoint.asynchronous import Save
    from fsdp_utils.checkpoint.errors import (
        CheckpointDamagedError,
        CheckpointError,
        CheckpointMismatchError,
        CheckpointNotFoundError,
    )
    from fsdp_utils.checkpoint.full import load_full, save_full
    from fsdp_utils.checkpoint.load import load_distributed
    from fsdp_utils.checkpoint.manifest import checkpoints, latest_step
    from fsdp_utils.checkpoint.save import save_distributed
    from fsdp_utils.checkpoint.user_state import LoadedState, PerRank
    from fsdp_utils.checkpoint.verify import verify_checkpoint

__all__ = [
    "CheckpointDamagedError",
    "CheckpointError",
    "CheckpointMismatchError",
    "CheckpointNotFoundError",
    "LoadedState",
    "PerRank",
    "Save",
    "checkpoints",
    "latest_step",
    "load_distributed",
    "load_full",
    "save_distributed",
    "save_full",
    "verify_checkpoint",
]
_MODULE_OF = {
    "CheckpointDamagedError": "errors",
    "CheckpointError": "errors",
    "CheckpointMismatchError": "errors",
    "CheckpointNotFoundError": "errors",
    "LoadedState": "user_state",
    "PerRank": "user_state",
    "Save": "asynchronous",
    "checkpoints": "manifest",
    "latest_step": "manifest",
    "load_distributed": "load",
    "load_full": "full",
    "save_distributed": "save",
    "save_full": "full",
    "verify_checkpoint": "verify",
}
__getattr__ = loader(__name__, _MODULE_OF)
