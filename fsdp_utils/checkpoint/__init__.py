"""Checkpoints with hashes: what is loaded is what was saved, or an error says why not.

`save_distributed` and `load_distributed` keep a run's state sharded in a directory, for any number of ranks;
`verify_checkpoint` compares files with their hashes. Tensors are in safetensors files (tensor_files.py), all
else in JSON (codec.py); state.py collects both, and folder.py has the layout of a checkpoint's folder.
"""

from fsdp_utils._lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
