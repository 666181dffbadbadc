"""FSDP units: choose them, find them, check them; names without wrappers; the part a rank holds."""

from fsdp_utils._lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
