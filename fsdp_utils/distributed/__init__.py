"""Ranks: identity, starting some on this machine, agreement between them.

Above torch_internals and below all else: no other room is imported here.
"""

from fsdp_utils._lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
