"""Tools for training with PyTorch FSDP, and what its lessons stand on.

Every public name is importable from here; the module that holds it (and torch
with it) is loaded only when the name is first used.
"""

from fsdp_utils._lazy import attach

__version__ = "0.1.0"

__getattr__, __dir__, __all__ = attach(__name__, __file__)
