"""Record which collectives FSDP or DDP issues: order, bytes, links and durations; replay, draw, compare."""

from fsdp_utils._lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
