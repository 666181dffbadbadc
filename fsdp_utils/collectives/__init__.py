"""Record which collectives FSDP or DDP issues: order, bytes, links and durations; replay, draw, compare.

c10d_hooks.py intercepts every call and knows the kinds of collectives; fsdp_hooks.py says for which unit a
call is. recording.py makes of both a trace.py, which replay.py, plot.py, player.py and perfetto.py show;
in_step.py compares the calls of all ranks.
"""

from fsdp_utils._lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
