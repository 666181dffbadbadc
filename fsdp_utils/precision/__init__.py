"""Checks whether this machine and its network can train in bf16, and says why not.

`bf16_support` asks; `python -m fsdp_utils.bf16` is the same from a shell.
"""

from typing import TYPE_CHECKING

from fsdp_utils._lazy import loader

if TYPE_CHECKING:
    from fsdp_utils.precision.bf16 import Bf16Support, bf16_support

__all__ = ["Bf16Support", "bf16_support"]
_MODULE_OF = {
    "Bf16Support": "bf16",
    "bf16_support": "bf16",
}
__getattr__ = loader(__name__, _MODULE_OF)
