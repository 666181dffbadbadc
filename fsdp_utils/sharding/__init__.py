"""Which modules become FSDP units, what they are called, and which part of a tensor a rank holds.

`shard` wraps a model with FSDP2, `wrap_policy` is the same choice for FSDP1, `check_sharding`
says what is wrong with how a model was wrapped.
"""

from typing import TYPE_CHECKING

from fsdp_utils._lazy import loader

if TYPE_CHECKING:
    from fsdp_utils.sharding.checks import check_sharding
    from fsdp_utils.sharding.wrapping import shard, transformer_block_classes, wrap_policy

__all__ = ["check_sharding", "shard", "transformer_block_classes", "wrap_policy"]
_MODULE_OF = {
    "check_sharding": "checks",
    "shard": "wrapping",
    "transformer_block_classes": "wrapping",
    "wrap_policy": "wrapping",
}
__getattr__ = loader(__name__, _MODULE_OF)
