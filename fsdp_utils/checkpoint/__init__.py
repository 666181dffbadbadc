"""Checkpoints that survive: what is loaded is what was saved, or an error says why not."""

from fsdp_utils.checkpoint.asynchronous import Save
from fsdp_utils.checkpoint.errors import CheckpointError
from fsdp_utils.checkpoint.full import load_full, save_full
from fsdp_utils.checkpoint.load import load_distributed
from fsdp_utils.checkpoint.plain import PerRank
from fsdp_utils.checkpoint.pretrained import load_pretrained
from fsdp_utils.checkpoint.safetensors import export_safetensors
from fsdp_utils.checkpoint.save import save_distributed
from fsdp_utils.checkpoint.verify import verify_checkpoint

__all__ = [
    "CheckpointError",
    "PerRank",
    "Save",
    "export_safetensors",
    "load_distributed",
    "load_full",
    "load_pretrained",
    "save_distributed",
    "save_full",
    "verify_checkpoint",
]
