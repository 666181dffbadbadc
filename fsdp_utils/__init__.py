"""Tools for training with PyTorch FSDP, and the library under its lessons.

Functions and classes that people call are imported from here, most classes of results and errors from their
rooms. `__init__.pyi` declares the names; _lazy.py loads a name's module (and torch) when it is first used.
_commands.py lists the command lines, _extras.py imports optional packages.
"""

from fsdp_utils._lazy import attach

__version__ = "0.1.0"

__getattr__, __dir__, __all__ = attach(__name__, __file__)
