"""What did FSDP or DDP send, in which order, how much, and over which links?"""

from fsdp_utils.collectives.recording import record_collectives
from fsdp_utils.collectives.replay import Replay, Span
from fsdp_utils.collectives.trace import Event, Trace

__all__ = ["Event", "Replay", "Span", "Trace", "record_collectives"]
