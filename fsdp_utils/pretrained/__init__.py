"""Weights in safetensors: read into the shards of a model, and export from a checkpoint.

`load_pretrained` reads a folder of safetensors files; `export_safetensors` writes the folder that
transformers' `from_pretrained` reads.
"""

from fsdp_utils._lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
