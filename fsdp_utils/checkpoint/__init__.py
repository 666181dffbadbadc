"""Checkpoints with hashes: what is loaded is what was saved, or an error says why not.

`save_distributed` and `load_distributed` keep a run's state sharded in a directory, for any number of
ranks; `save_full` and `load_full` in one file; `verify_checkpoint` holds files against their hashes.
"""

from typing import TYPE_CHECKING

from fsdp_utils._lazy import loader

if TYPE_CHECKING:
    from fsdp_utils.checkpoint.asynchronous import Save
    from fsdp_utils.checkpoint.errors import CheckpointError
    from fsdp_utils.checkpoint.full import load_full, save_full
    from fsdp_utils.checkpoint.load import load_distributed
    from fsdp_utils.checkpoint.save import save_distributed
    from fsdp_utils.checkpoint.user_state import LoadedState, PerRank
    from fsdp_utils.checkpoint.verify import verify_checkpoint

__all__ = [
    "CheckpointError",
    "LoadedState",
    "PerRank",
    "Save",
    "load_distributed",
    "load_full",
    "save_distributed",
    "save_full",
    "verify_checkpoint",
]
_MODULE_OF = {
    "CheckpointError": "errors",
    "LoadedState": "user_state",
    "PerRank": "user_state",
    "Save": "asynchronous",
    "load_distributed": "load",
    "load_full": "full",
    "save_distributed": "save",
    "save_full": "full",
    "verify_checkpoint": "verify",
}
__getattr__ = loader(__name__, _MODULE_OF)
