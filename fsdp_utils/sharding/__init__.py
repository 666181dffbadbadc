"""FSDP units: choose them, find them, check them; names without wrappers; the part a rank holds.

`shard` wraps a model with FSDP2 (wrapping.py), `transformer_block_classes` gives the classes for FSDP1's
policy (blocks.py), `check_sharding` finds mistakes in how a model was wrapped: checks.py has the table of
its checks.
"""

from fsdp_utils._lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
