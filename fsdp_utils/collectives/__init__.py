"""Record which collectives FSDP or DDP issues: order, bytes, links and durations; replay, draw, compare."""

from typing import TYPE_CHECKING

from fsdp_utils._lazy import loader

if TYPE_CHECKING:
    from fsdp_utils.collectives.c10d_hooks import listen_to_calls
    from fsdp_utils.collectives.events import Span, StepEvent
    from fsdp_utils.collectives.in_step import InStep, OutOfStep, check_in_step
    from fsdp_utils.collectives.player import Player, play
    from fsdp_utils.collectives.recording import record_collectives
    from fsdp_utils.collectives.replay import Replay
    from fsdp_utils.collectives.trace import CollectiveTrace

__all__ = [
    "CollectiveTrace",
    "InStep",
    "OutOfStep",
    "Player",
    "Replay",
    "Span",
    "StepEvent",
    "check_in_step",
    "listen_to_calls",
    "play",
    "record_collectives",
]
_MODULE_OF = {
    "CollectiveTrace": "trace",
    "InStep": "in_step",
    "OutOfStep": "in_step",
    "Player": "player",
    "Replay": "replay",
    "Span": "events",
    "StepEvent": "events",
    "check_in_step": "in_step",
    "listen_to_calls": "c10d_hooks",
    "play": "player",
    "record_collectives": "recording",
}
__getattr__ = loader(__name__, _MODULE_OF)
