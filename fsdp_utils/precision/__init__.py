"""Checks whether this machine and its network can train in bf16, and says why not.

`bf16_support` asks; `python -m fsdp_utils.bf16` is the same from a shell.
"""

from fsdp_utils._lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
