"""FSDP units: choose them, find them, check them; names without wrappers; the part a rank holds.

`shard` wraps a model with FSDP2, `transformer_block_classes` gives the classes for FSDP1's policy,
`check_sharding` finds mistakes in how a model was wrapped.
"""

from typing import TYPE_CHECKING

from fsdp_utils._lazy import loader

if TYPE_CHECKING:
    from fsdp_utils.sharding.blocks import transformer_block_classes
    from fsdp_utils.sharding.checks import check_sharding
    from fsdp_utils.sharding.wrapping import shard

__all__ = ["check_sharding", "shard", "transformer_block_classes"]
_MODULE_OF = {"check_sharding": "checks", "shard": "wrapping", "transformer_block_classes": "blocks"}
__getattr__ = loader(__name__, _MODULE_OF)
