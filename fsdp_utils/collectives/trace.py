"""The trace of one rank: everything it sent, computed and freed, in the order of issue."""

from __future__ import annotations

import json
import os
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fsdp_utils._extras import need
from fsdp_utils.collectives.events import FREE, Span, StepEvent
from fsdp_utils.collectives.perfetto import trace_events
from fsdp_utils.collectives.replay import Replay, replay

MIB = 2**20


@dataclass
class CollectiveTrace:
    """The recording of `record_collectives` on this rank."""

    rank: int
    world_size: int
    unit_bytes: dict[str, int] = field(default_factory=dict)  #: of its full parameters, without padding
    events: list[StepEvent] = field(default_factory=list)  #: in the order of issue
    notes: list[str] = field(default_factory=list)  #: such as the exception that ended the recording

    @property
    def collectives(self) -> list[StepEvent]:
        """The events in which ranks communicated."""
        return [event for event in self.events if event.is_collective]

    @property
    def peak_units(self) -> int:
        """The largest number of units that were gathered in the recording and not yet freed."""
        gathered: set[str] = set()
        most = 0
        for event in self.events:
            if event.kind == "all_gather" and event.module:
                gathered.add(event.module)
                most = max(most, len(gathered))
            elif event.kind == FREE:
                gathered.discard(event.module)
        return most

    def bytes_by_kind(self) -> dict[str, int]:
        """Bytes of all collectives of each kind (`StepEvent.bytes`), such as {"all_gather": 4096}."""
        total: Counter[str] = Counter()
        for event in self.collectives:
            total[event.kind] += event.bytes
        return dict(total)

    def sent_bytes_by_dimension(self) -> dict[str, float]:
        """Bytes that this rank has to send along each mesh dimension, by its name; "" where it has none."""
        total: dict[str, float] = {}
        for event in self.collectives:
            total[event.dimension] = total.get(event.dimension, 0.0) + event.sent_bytes
        return total

    def summary(self) -> str:
        """A table: how many collectives of each kind, phase, mesh dimension and link, and how many MiB."""
        rows: dict[tuple[str, ...], list[StepEvent]] = {}
        for event in self.collectives:
            key = (event.kind, event.phase, event.dimension, str(len(event.ranks)), event.link)
            rows.setdefault(key, []).append(event)
        titles = "collective", "phase", "dimension", "ranks", "link", "count", "MiB", "MiB sent"
        table: list[tuple[str, ...]] = [titles]
        for key, events in rows.items():
            mib, sent = sum(e.bytes for e in events) / MIB, sum(e.sent_bytes for e in events) / MIB
            table.append((*key, str(len(events)), f"{mib:.3f}", f"{sent:.3f}"))
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in table]
        title = f"rank {self.rank} of {self.world_size}: {len(self.collectives)} collectives"
        return "\n".join([title, *lines, *(f"note: {note}" for note in self.notes)])

    def __str__(self) -> str:
        return self.summary()

    def plot(self) -> Any:
        """Draw when each event ran, with a colour for each unit; returns a matplotlib Figure."""
        need("matplotlib", "notebooks")
        from fsdp_utils.collectives.plot import timelines  # here, as matplotlib may not be installed

        spans = [
            Span(event, event.start, event.start + event.seconds)
            for event in self.events
            if event.kind != FREE and event.seconds is not None
        ]
        return timelines({f"rank {self.rank}, recorded": spans}, list(self.unit_bytes))

    def to_perfetto(self, path: str | os.PathLike[str], *others: CollectiveTrace) -> None:
        """Write a file that https://ui.perfetto.dev and chrome://tracing open, to zoom and to search.

        Each rank is a process, each kind of event a thread of it. A collective whose end was not seen is left
        out.

        Args:
            path: of the file, JSON by content.
            others: the traces of other ranks. Each rank's times begin with its recording.
        """
        events = [event for trace in (self, *others) for event in trace_events(trace)]
        text = json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})
        Path(path).write_text(text, encoding="utf-8")

    def replay(self, **options: Any) -> Replay:
        """Simulate how long this order takes if computation and communication overlap.

        Args:
            options: those of `fsdp_utils.collectives.replay.replay`, from compute_s on.

        Raises:
            ValueError: a duration is wanted that was not recorded.
            KeyError: a link has no speed.
        """
        return replay(self.events, units=list(self.unit_bytes), **options)
