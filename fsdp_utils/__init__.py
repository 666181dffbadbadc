"""Tools for training with PyTorch FSDP, and what its lessons stand on.

The functions and classes that people call are imported from here, most classes of results and errors from
their rooms. The module that holds a name (and torch with it) is loaded when the name is first used.
"""

from fsdp_utils._lazy import attach

__version__ = "0.1.0"

__getattr__, __dir__, __all__ = attach(__name__, __file__)
