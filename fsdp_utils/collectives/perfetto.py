"""Recorded steps as events that https://ui.perfetto.dev and chrome://tracing show."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fsdp_utils.collectives.events import FREE, StepEvent

if TYPE_CHECKING:
    from fsdp_utils.collectives.trace import CollectiveTrace

MICROSECONDS = 1e6


def trace_events(trace: CollectiveTrace) -> list[dict[str, Any]]:
    """Chrome's Trace Event Format: a process for each rank, a thread for each kind of event.

    Source: the document that https://perfetto.dev/docs/getting-started/other-formats links to.
    """
    ends: dict[tuple[str, int], float] = {}  # by thread, of a kind and a number: when its last event ends
    timed: list[dict[str, Any]] = []
    for event in sorted(trace.events, key=lambda event: event.start):
        if event.seconds is None:
            continue  # its end was not seen
        number = 0  # events of one thread must not overlap
        while ends.get((event.kind, number), 0.0) > event.start:
            number += 1
        ends[event.kind, number] = event.start + event.seconds
        told = {"tid": [*ends].index((event.kind, number)), "args": _args(event), "cat": event.phase}
        told |= {"name": f"{event.kind} {event.module}".rstrip(), "ts": event.start * MICROSECONDS}
        lasts = {"ph": "X", "dur": event.seconds * MICROSECONDS}
        timed.append(told | ({"ph": "i", "s": "t"} if event.kind == FREE else lasts))
    named = [{"ph": "M", "name": "process_name", "args": {"name": f"rank {trace.rank}"}}]
    named += [
        {"ph": "M", "tid": thread, "name": "thread_name", "args": {"name": kind}}
        for thread, (kind, _) in enumerate(ends)
    ]
    return [{"pid": trace.rank, **event} for event in named + timed]


def _args(event: StepEvent) -> dict[str, Any]:
    told = {"order": event.order, "phase": event.phase, "unit": event.module}
    sent = {"bytes in": event.bytes_in, "bytes out": event.bytes_out, "bytes sent at least": event.sent_bytes}
    where = {"ranks": list(event.ranks), "link": event.link, "mesh dimension": event.dimension}
    return {**told, **sent, **where} if event.is_collective else told
