"""Translate a config of Accelerate, transformers, axolotl, Composer or DeepSpeed to FSDP2.

`translate` reads the config. Its result holds the settings, the Python to write, and what became of each
key: a setting without a counterpart in FSDP2 is named, with the reason. The keys are rows of `tables/*.json`,
one file for each framework; a new key is a new row there.
"""

from fsdp_utils._lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
