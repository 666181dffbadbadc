"""Error messages of FSDP and what to do about them: a table, and a search for a pasted traceback in it.

messages.yaml and questions.yaml are the tables, lookup.py finds messages. Needs no torch.
"""

from fsdp_utils._lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
