"""Simulate the recorded order on one stream of computation and one or two of communication."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from fsdp_utils.collectives.events import BUCKET, COMPUTE, FREE, Span, StepEvent
from fsdp_utils.sharding.units import ROOT

GIB = 2**30
BACKWARD = 2.0  # a matrix product of forward has two in backward: for its input and for its weight


@dataclass(frozen=True)
class Replay:
    """A simulation: when each recorded event runs if computation and communication overlap.

    Args:
        spans: In the order of issue.
        units: Names of the units, in the model's order.

    Example::

        run = trace.replay(compute_s=1e-3, link_gib_s=1.0)
        last = max(run.spans, key=lambda span: span.end)
        print(f"{run.step_s:.3f} s, {last.event.phase} ends it")
        # 0.006 s, backward ends it
    """

    spans: tuple[Span, ...]
    units: tuple[str, ...]

    @property
    def step_s(self) -> float:
        """Seconds until all streams are done."""
        return max((span.end for span in self.spans), default=0.0)

    @property
    def running(self) -> list[Span]:
        """The spans of what takes time."""
        return [span for span in self.spans if span.end > span.start]

    @property
    def compute_s(self) -> float:
        """Seconds in which something is computed."""
        return sum(span.end - span.start for span in self.spans if span.event.kind == COMPUTE)

    @property
    def exposed_s(self) -> float:
        """Seconds in which something is sent and nothing is computed."""
        changes: Counter[tuple[float, bool]] = Counter()  # by moment and stream: begun, less ended
        for span in self.running:
            changes[span.start, span.event.is_collective] += 1
            changes[span.end, span.event.is_collective] -= 1
        exposed, running = 0.0, {True: 0, False: 0}
        for (moment, is_sent), (until, _) in pairwise([*sorted(changes), (0.0, False)]):
            running[is_sent] += changes[moment, is_sent]
            if running[True] and not running[False]:
                exposed += until - moment
        return exposed


def replay(
    events: Sequence[StepEvent],
    *,
    units: Sequence[str] = (),
    compute_s: float | Mapping[str, float] | None = None,
    link_gib_s: float | Mapping[str, float] | None = None,
    issue_s: float = 0.0,
    limit_units: int | None = 2,
    limit_reduces: int | None = None,
) -> Replay:
    """Simulate how long this order takes if computation and communication overlap.

    The CPU issues the events in their recorded order. Each waits for its stream; computation also for the
    all-gather of its unit; a reduce-scatter or all-reduce also for all computation issued before it. What the
    model itself sends (`StepEvent.is_of_the_model`), as under tensor parallelism, has another stream, and the
    computation issued after it waits for it. Collectives that share a link do not slow each other down.

    Args:
        events: As recorded; of one step or of several.
        units: Names of the units, in the model's order.
        compute_s: Seconds that a unit computes in forward: one number for all but the root, or by name; what
            is not named takes none. Backward takes twice as long, and an optimizer step, and what activation
            checkpointing computes again, no time. None: as recorded.
        link_gib_s: GiB/s at which a rank sends: one number, or by link ("within a host", "between hosts"). A
            collective takes `StepEvent.sent_bytes` divided by it. None: as recorded.
        issue_s: Seconds that the CPU takes to issue the computation of a unit in forward, and twice that in
            backward: computation does not end before its last kernel is issued.
        limit_units: An all-gather waits until the unit is done that was freed that many units before, as
            under FSDP1's limit_all_gathers, whose limit is 2. None: no limit.
        limit_reduces: The reduce-scatter of a unit, and the computation issued after it, wait until the one
            that many before it is done, as under FSDP2's set_reduce_scatter_max_input_buffers, which is 1
            unless you set it. None: no limit.
    """
    shares = _shares(events)
    cpu = computed = sent = 0.0  # when the CPU, and each stream, is free again
    gathered: dict[str, float] = {}  # when a unit's full parameters are there
    freed: list[float] = []  # when units were done that no all-gather has waited for yet
    reduced: list[float] = []  # when reduce-scatters are done that no later one has waited for yet
    spans = []
    for event in events:
        if event.kind == FREE:
            freed.append(max(cpu, computed))
            start = end = freed[-1]
        elif event.kind == COMPUTE:
            start = max(cpu, computed, gathered.get(event.module, 0.0))
            cpu += _computing(event, issue_s, shares)
            if compute_s is None:
                end = start + _recorded(event, "compute_s")
            else:
                end = start + _computing(event, compute_s, shares)
            end = computed = max(cpu, end)
        elif event.is_of_the_model:
            start = max(cpu, computed)  # it follows the one before it: that one, too, was waited for
            end = computed = start + _sending(event, link_gib_s)
        else:
            start = max(cpu, sent)
            if event.kind == "all_gather" and event.module:
                if limit_units is not None and len(freed) >= limit_units:
                    start = max(start, freed.pop(0))
            else:
                if (
                    event.kind == "reduce_scatter"
                    and limit_reduces is not None
                    and len(reduced) >= limit_reduces
                ):
                    computed = max(computed, reduced.pop(0))
                start = max(start, computed)
            end = sent = start + _sending(event, link_gib_s)
            if event.kind == "all_gather":
                gathered[event.module] = end
            elif event.kind == "reduce_scatter":
                reduced.append(end)
        spans.append(Span(event, start, end))
    return Replay(tuple(spans), tuple(units))


def _shares(events: Sequence[StepEvent]) -> dict[int, float]:
    """By order of each computation: which part it is of its unit's forward or backward.

    Where something came between, a unit has several. In backward they are in proportion to the bytes of DDP's
    buckets after them; under FSDP the first is all, as the others only copy gradients together; else equal.
    """
    passes: dict[tuple[str, int, int], dict[int, float]] = defaultdict(dict)
    bucket_bytes: dict[int, int] = defaultdict(int)  # that follow a computation
    done: dict[tuple[str, int], int] = defaultdict(int)
    turn, last = 0, None  # forwards and backwards, and the computation before this event
    for event in events:
        if event.kind == COMPUTE:
            if last is None or last.phase != event.phase:
                turn += 1
            parts = passes[event.module, turn, done[event.module, turn]]
            goes_on = event.phase == "backward" and last is not None and last.order in parts
            parts[event.order] = 0.0 if goes_on else 1.0
            last = event
        elif event.kind == "all_reduce" and event.module.startswith(BUCKET) and last is not None:
            bucket_bytes[last.order] += event.bytes
        elif event.kind in (FREE, "reduce_scatter"):  # the next computation of this unit is another pass
            done[event.module, turn] += 1
    shares = {}
    for parts in passes.values():
        in_buckets = {order: float(bucket_bytes[order]) for order in parts}
        weights = in_buckets if any(in_buckets.values()) else parts
        shares |= {order: weight / sum(weights.values()) for order, weight in weights.items()}
    return shares


def _computing(event: StepEvent, seconds: float | Mapping[str, float], shares: Mapping[int, float]) -> float:
    """The part of an event in the seconds that its unit takes in forward, or in twice that in backward."""
    if isinstance(seconds, Mapping):
        of_unit = seconds.get(event.module, 0.0)
    else:
        of_unit = 0.0 if event.module == ROOT else seconds
    return of_unit * shares[event.order] * {"forward": 1.0, "backward": BACKWARD}.get(event.phase, 0.0)


def _sending(event: StepEvent, link_gib_s: float | Mapping[str, float] | None) -> float:
    if link_gib_s is None:
        return _recorded(event, "link_gib_s")
    speed = link_gib_s[event.link] if isinstance(link_gib_s, Mapping) else link_gib_s
    return event.sent_bytes / GIB / speed


def _recorded(event: StepEvent, argument: str) -> float:
    if event.seconds is None:
        raise ValueError(
            f"replay: no duration was recorded for event {event.order} ({event.kind} {event.module}). "
            f"Give {argument}."
        )
    return event.seconds
