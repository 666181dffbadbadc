"""Record which collectives FSDP or DDP issues: order, bytes, links and durations; replay, draw, compare."""

from fsdp_utils.collectives.c10d_hooks import listen_to_calls
from fsdp_utils.collectives.events import Span, StepEvent
from fsdp_utils.collectives.in_step import InStep, OutOfStep, check_in_step
from fsdp_utils.collectives.player import Player, play
from fsdp_utils.collectives.recording import record_collectives
from fsdp_utils.collectives.replay import Replay
from fsdp_utils.collectives.trace import CollectiveTrace

Event, Trace = StepEvent, CollectiveTrace  # their names in earlier versions

__all__ = [
    "CollectiveTrace",
    "Event",
    "InStep",
    "OutOfStep",
    "Player",
    "Replay",
    "Span",
    "StepEvent",
    "Trace",
    "check_in_step",
    "listen_to_calls",
    "play",
    "record_collectives",
]
