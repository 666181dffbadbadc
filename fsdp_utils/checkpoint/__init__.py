"""Checkpoints with hashes: what is loaded is what was saved, or an error says why not.

`save_distributed` and `load_distributed` keep a run's state sharded in a directory, for any number of ranks;
`verify_checkpoint` compares files with their hashes. Tensors are in safetensors files, all else in JSON.
"""

from fsdp_utils._lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
