"""Translate a config of Accelerate, transformers, axolotl, Composer or DeepSpeed to FSDP2.

`translate` reads the config. What it returns holds the settings, the Python to write, and what became of each
key. Nothing is dropped in silence: a setting that FSDP2 has no counterpart for is named, with the reason.
"""

from fsdp_utils._lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
