"""Predict memory and time on GPUs that you don't have. See `plan` and `search`.

As in `fsdp_utils` itself, a module is loaded when one of its names is first used.
"""

from fsdp_utils._lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
