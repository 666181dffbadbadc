"""Ranks: identity, starting some on this machine, agreement between them.

identity.py says who this process is, launch.py is `run_on_ranks`, agreement.py the one way in which ranks
agree on values and failures. Above torch_internals and below all else: no other room is imported here.
"""

from fsdp_utils._lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
