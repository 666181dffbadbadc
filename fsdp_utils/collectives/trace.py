"""The trace of one rank: everything it sent, computed and freed, in the order of issue."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from fsdp_utils._extras import need
from fsdp_utils.collectives.events import FREE, Span, StepEvent, peak_units
from fsdp_utils.collectives.perfetto import write_perfetto
from fsdp_utils.collectives.replay import Replay, replay

MIB = 2**20


@dataclass
class CollectiveTrace:
    """The recording of `record_collectives` on this rank.

    Args:
        rank, world_size: Whose trace it is.
        unit_bytes: By name of each FSDP unit: bytes of its full parameters, without padding.
        events: In the order of issue.
        notes: What is to be known about the recording itself, such as the exception that ended it.
    """

    rank: int
    world_size: int
    unit_bytes: dict[str, int] = field(default_factory=dict)
    events: list[StepEvent] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def collectives(self) -> list[StepEvent]:
        """The events in which ranks communicated."""
        return [event for event in self.events if event.is_collective]

    @property
    def peak_units(self) -> int:
        """The largest number of units that were gathered and not yet freed, in the order of issue.

        Units that were gathered already when the recording began are not counted.
        """
        return peak_units(self.events)

    def bytes_by_kind(self) -> dict[str, int]:
        """Bytes of all collectives of each kind (`StepEvent.bytes`), such as {"all_gather": 4096}."""
        total: Counter[str] = Counter()
        for event in self.collectives:
            total[event.kind] += event.bytes
        return dict(total)

    def sent_bytes_by_link(self) -> dict[str, float]:
        """Bytes that this rank has to send (`StepEvent.sent_bytes`) within a host, and between hosts.

        All bytes of a collective across hosts count as between hosts, though some pass from one rank to
        another on the same host: an upper bound of what crosses the link.
        """
        return self._sent_by("link")

    def sent_bytes_by_dimension(self) -> dict[str, float]:
        """Bytes that this rank has to send along each mesh dimension, by its name; "" where it has none."""
        return self._sent_by("dimension")

    def _sent_by(self, attribute: str) -> dict[str, float]:
        total: dict[str, float] = {}
        for event in self.collectives:
            key = getattr(event, attribute)
            total[key] = total.get(key, 0.0) + event.sent_bytes
        return total

    def order(self, phase: str | None = None) -> list[str]:
        """List what was issued, in words such as "all_gather blocks.3", without what was freed.

        Args:
            phase: Only that phase.
        """
        return [
            f"{event.kind} {event.module}".rstrip()
            for event in self.events
            if event.kind != FREE and phase in (None, event.phase)
        ]

    def summary(self) -> str:
        """A table: how many collectives of each kind, phase, mesh dimension and link, and how many MiB."""
        rows: dict[tuple[str, ...], list[float]] = {}
        for event in self.collectives:
            key = (event.kind, event.phase, event.dimension, str(len(event.ranks)), event.link)
            row = rows.setdefault(key, [0, 0.0, 0.0])
            row[0] += 1
            row[1] += event.bytes / MIB
            row[2] += event.sent_bytes / MIB
        table = [("collective", "phase", "dimension", "ranks", "link", "count", "MiB", "MiB sent")]
        table += [
            (*key, f"{count:.0f}", f"{mib:.3f}", f"{sent:.3f}") for key, (count, mib, sent) in rows.items()
        ]
        columns = [*zip(*table, strict=True)]
        if not any(event.dimension for event in self.collectives):
            del columns[2]
        for i, column in enumerate(columns):
            numbers = column[0] in ("ranks", "count", "MiB", "MiB sent")
            width = max(map(len, column))
            columns[i] = tuple(cell.rjust(width) if numbers else cell.ljust(width) for cell in column)
        lines = ["  ".join(row).rstrip() for row in zip(*columns, strict=True)]
        title = f"rank {self.rank} of {self.world_size}: {len(self.collectives)} collectives"
        return "\n".join([title, *lines, *(f"note: {note}" for note in self.notes)])

    def __str__(self) -> str:
        return self.summary()

    def plot(self) -> Any:
        """Draw when each event ran, with a colour for each unit.

        Returns:
            A matplotlib Figure, on the time axis of the recording.
        """
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

        Each rank is a process, each kind of event a thread of it; bytes, unit and ranks are shown with an
        event. A collective whose end was not seen is left out.

        Args:
            path: of the file, JSON by content.
            others: what other ranks recorded of the same step. Each rank's times begin with its recording.

        Raises:
            ValueError: two traces are of one rank.
        """
        write_perfetto(path, [self, *others])

    def replay(self, **options: Any) -> Replay:
        """Simulate how long this order takes if computation and communication overlap.

        Args:
            options: those of `fsdp_utils.collectives.replay.replay`, from compute_s on.

        Raises:
            ValueError: a number is negative, or a duration is wanted that was not recorded.
            KeyError: a link has no speed.
        """
        return replay(self.events, units=list(self.unit_bytes), **options)
