"""Memory use of a training loop, and the batch size that is fastest. Sizes are GiB (2^30 bytes)."""

from fsdp_utils._lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
