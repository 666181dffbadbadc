"""FSDP units: choose them, find them, check them; names without wrappers; the part a rank holds.

`shard` wraps a model with FSDP2, `transformer_block_classes` gives the classes for FSDP1's policy,
`check_sharding` finds mistakes in how a model was wrapped.
"""

from fsdp_utils._lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
