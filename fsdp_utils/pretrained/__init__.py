"""Weights in safetensors: read into the shards of a model, and export from a checkpoint.

`load_pretrained` reads a folder of safetensors files; `export_safetensors` writes the folder that
transformers' `from_pretrained` reads.
"""

from typing import TYPE_CHECKING

from fsdp_utils._lazy import loader

if TYPE_CHECKING:
    from fsdp_utils.pretrained.export import export_safetensors
    from fsdp_utils.pretrained.loading import load_pretrained

__all__ = ["export_safetensors", "load_pretrained"]
_MODULE_OF = {
    "export_safetensors": "export",
    "load_pretrained": "loading",
}
__getattr__ = loader(__name__, _MODULE_OF)
