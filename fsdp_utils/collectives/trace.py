"""What was recorded: collectives, computation and freed units, in the order in which they were issued."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from fsdp_utils._extras import need

if TYPE_CHECKING:
    from fsdp_utils.collectives.replay import Replay

COMPUTE, FREE = "compute", "free"
BUCKET = "bucket "  # and its number: what DDP reduces at once
WITHIN, BETWEEN = "within a host", "between hosts"
MIB = 2**20


@dataclass
class Event:
    """One thing that this rank issued.

    Args:
        order: Place in the order of issue, from 0.
        kind: "all_gather", "reduce_scatter", "all_reduce", "broadcast", ...; "compute" for what was computed
            between two other events for one module; "free" when a gathered unit was given up.
        module: Name of the FSDP unit that the bytes belong to, "(root)" for the model itself, "bucket 0",
            "bucket 1", ... for the gradients of DDP, "" where it belongs to no unit.
        phase: "forward", "backward", "optimizer", or "other" for what is none of these.
        bytes_in, bytes_out: What this rank gave to the collective and what it got, padding included.
        ranks: Global ranks that took part; empty where nothing was sent.
        link: "within a host" or "between hosts"; "" where nothing was sent.
        start: Seconds since the recording began. On a GPU, where streams run side by side, events need not
            start in their order.
        seconds: Duration; None for a collective that nobody has seen end. gloo does not tell the end of a
            reduce-scatter, a send or a receive: what is not FSDP's own lasts until the model's next event.
    """

    order: int
    kind: str
    module: str
    phase: str
    bytes_in: int = 0
    bytes_out: int = 0
    ranks: tuple[int, ...] = ()
    link: str = ""
    start: float = 0.0
    seconds: float | None = None

    @property
    def is_collective(self) -> bool:
        """Did ranks talk to each other?"""
        return self.kind not in (COMPUTE, FREE)

    @property
    def bytes(self) -> int:
        """Bytes of the whole: what an all-gather gives, what a reduce-scatter or an all-reduce takes."""
        return max(self.bytes_in, self.bytes_out)

    @property
    def sent_bytes(self) -> float:
        """Bytes that this rank has to send, if they go around a ring: the least that is possible.

        (n - 1) / n of `bytes` for n ranks, and twice that for an all-reduce. For kinds in which ranks do not
        send alike, such as a broadcast, it is the mean over the ranks.

        Source: https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md
        """
        if not self.ranks or self.kind == "recv":
            return 0.0
        if self.kind == "send":
            return float(self.bytes_in)
        rounds = 2 if self.kind == "all_reduce" else 1
        whole = self.bytes
        if self.kind in ("gather", "scatter"):  # the root has the whole on one side, and a piece on the other
            whole = min(self.bytes_in, self.bytes_out) or whole
        return rounds * (len(self.ranks) - 1) * whole / len(self.ranks)


@dataclass
class Trace:
    """What `record_collectives` saw on this rank.

    Args:
        rank, world_size: Whose trace it is.
        unit_bytes: By name of each FSDP unit: bytes of its whole parameters, without padding.
        events: In the order of issue.
        notes: What is to be known about the recording itself, such as the exception that ended it.
    """

    rank: int
    world_size: int
    unit_bytes: dict[str, int] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def collectives(self) -> list[Event]:
        """The events in which ranks talked to each other."""
        return [event for event in self.events if event.is_collective]

    @property
    def peak_units(self) -> int:
        """How many units were gathered and not yet freed at once, in the order of issue?

        Units that were whole when the recording began are not among them.
        """
        return peak_units(self.events)

    def bytes_by_kind(self) -> dict[str, int]:
        """Bytes of all collectives of each kind (`Event.bytes`), such as {"all_gather": 4096}."""
        total: Counter[str] = Counter()
        for event in self.collectives:
            total[event.kind] += event.bytes
        return dict(total)

    def sent_bytes_by_link(self) -> dict[str, float]:
        """Bytes that this rank has to send (`Event.sent_bytes`) within a host, and between hosts.

        All bytes of a collective across hosts count as between hosts, though some pass from one rank to
        another on the same host: an upper bound of what crosses the link.
        """
        total: dict[str, float] = {}
        for event in self.collectives:
            total[event.link] = total.get(event.link, 0.0) + event.sent_bytes
        return total

    def order(self, phase: str | None = None) -> list[str]:
        """What was issued, as words such as "all_gather blocks.3", without what was freed.

        Args:
            phase: Only that phase.
        """
        return [
            f"{event.kind} {event.module}".rstrip()
            for event in self.events
            if event.kind != FREE and phase in (None, event.phase)
        ]

    def summary(self) -> str:
        """A table: for each kind of collective, phase and link, how many, and how many MiB."""
        head = ("collective", "phase", "ranks", "link", "count", "MiB", "MiB sent")
        rows: dict[tuple[Any, ...], list[float]] = {}
        for event in self.collectives:
            key = (event.kind, event.phase, len(event.ranks), event.link)
            row = rows.setdefault(key, [0, 0.0, 0.0])
            row[0] += 1
            row[1] += event.bytes / MIB
            row[2] += event.sent_bytes / MIB
        cells: list[tuple[Any, ...]] = [head]
        for key, (count, whole, sent) in rows.items():
            cells.append((*key, int(count), f"{whole:.3f}", f"{sent:.3f}"))
        widths = [max(len(str(cell)) for cell in column) for column in zip(*cells, strict=True)]
        words = (0, 1, 3)  # to the left; numbers to the right
        lines = [
            "  ".join(
                str(cell).ljust(width) if i in words else str(cell).rjust(width)
                for i, (cell, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in cells
        ]
        title = f"rank {self.rank} of {self.world_size}: {len(self.collectives)} collectives"
        return "\n".join([title, *lines, *(f"note: {note}" for note in self.notes)])

    def __str__(self) -> str:
        return self.summary()

    def plot(self) -> Any:
        """When did what run? One lane for computation, one for each kind of collective, a colour for a unit.

        Returns:
            A matplotlib Figure, on the time axis of the recording.

        Raises:
            ModuleNotFoundError: matplotlib is not installed; says how to install it.
        """
        need("matplotlib", "notebooks")
        from fsdp_utils.collectives.plot import Bar, plot_bars  # here: only who plots needs it

        bars = [
            Bar(event.kind, event.module, event.start, event.start + event.seconds)
            for event in self.events
            if event.kind != FREE and event.seconds is not None
        ]
        return plot_bars(bars, list(self.unit_bytes), title=f"rank {self.rank}, recorded")

    def replay(
        self,
        *,
        compute_s: float | Mapping[str, float] | None = None,
        link_gib_s: float | Mapping[str, float] | None = None,
        latency_s: float = 0.0,
        issue_s: float = 0.0,
        limit_units: int | None = 2,
    ) -> Replay:
        """A simulation: how long would this order take if computation and communication overlapped?

        See `fsdp_utils.collectives.replay.replay`.
        """
        from fsdp_utils.collectives.replay import replay

        return replay(
            self.events,
            units=list(self.unit_bytes),
            compute_s=compute_s,
            link_gib_s=link_gib_s,
            latency_s=latency_s,
            issue_s=issue_s,
            limit_units=limit_units,
        )


def peak_units(events: list[Event]) -> int:
    """How many units were gathered and not yet freed at once, in the order of issue?"""
    gathered: set[str] = set()
    most = 0
    for event in events:
        if event.kind == "all_gather" and event.module:
            gathered.add(event.module)
            most = max(most, len(gathered))
        elif event.kind == FREE:
            gathered.discard(event.module)
    return most
