"""A player for replayed steps: what runs, and what a rank holds, at each moment. It moves in a browser."""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Mapping, Sequence
from typing import Any

from fsdp_utils._extras import need
from fsdp_utils.collectives.events import COMPUTE, FREE, Span
from fsdp_utils.collectives.interactive import Interactive
from fsdp_utils.collectives.replay import Replay
from fsdp_utils.sharding.units import ROOT


class Player(Interactive):
    """Replayed steps on one time axis, to play, step and scrub. See `play`."""

    SCRIPT = "fsdp_utils.collectives", "player.js"


def play(runs: Mapping[str, Replay], *, choose: bool = False) -> Player:
    """Show replayed steps in a player: play, pause, step from event to event, scrub, change the speed.

    Below the streams of a run stands what one rank holds of each unit: from its shard to the full parameters
    and back, and gradients (hatched) until they are reduced to the shard's.

    Args:
        runs: by title, one above the other on one time axis. The titles should say that these are replays.
        choose: show one run at a time, the first to begin with, and a button for each.

    Returns:
        The player, as a notebook shows it.

    Raises:
        ValueError: no run is given, or nothing takes time in one.

    Example::

        slow = trace.replay(compute_s=1e-3, link_gib_s=1.0)
        fast = trace.replay(compute_s=1e-3, link_gib_s=10.0)
        play({"replay: 1 GiB/s": slow, "replay: 10 GiB/s": fast})
    """
    need("matplotlib", "notebooks")
    from fsdp_utils.collectives import plot  # here, as matplotlib may not be installed

    empty = [title for title, run in runs.items() if not run.step_s]
    if empty or not runs:
        found = f"{empty or 'no replay'}. Give trace.replay() compute_s or link_gib_s."
        raise ValueError(f"play: expected replays in which something takes time, found {found}")
    until = max(run.step_s for run in runs.values())
    units = list(dict.fromkeys(unit for run in runs.values() for unit in run.units if unit != ROOT))
    time_unit, scale = plot.time_unit(until)
    steps = ", ".join(f"{title} takes {run.step_s * scale:.2f} {time_unit}" for title, run in runs.items())
    data = {
        "alt": f"Player of a step: {steps}.",
        "until": _rounded(until),
        "choose": choose,
        "time_unit": {"seconds": "s", "milliseconds": "ms", "microseconds": "µs"}[time_unit],
        "scale": scale,
        "colors": {unit: plot.color(unit, units) for unit in units},
        "runs": [_run(title, run) for title, run in runs.items()],
    }
    data["id"] = "p" + hashlib.sha256(json.dumps(data).encode()).hexdigest()[:12]
    buffer = io.BytesIO()
    still = plot.timelines({title: run.running for title, run in runs.items()}, units, until=until)
    still.savefig(buffer, format="png", dpi=80)
    return Player(data, data["alt"], buffer.getvalue())


def _run(title: str, run: Replay) -> dict[str, Any]:
    own = any(span.event.is_of_the_model for span in run.spans)
    return {
        "title": title,
        "lanes": ["compute", "communication", *(["in the model"] if own else [])],
        "spans": [
            {
                "lane": event.is_collective + event.is_of_the_model,
                "kind": event.kind,
                "unit": event.module,
                "phase": event.phase,
                "bytes": event.bytes,
                "start": _rounded(span.start),
                "end": _rounded(span.end),
                "gradients": event.kind in ("reduce_scatter", "all_reduce"),
            }
            for span in run.running
            for event in [span.event]
        ],
        "held": {unit: _points(run.spans, unit) for unit in run.units if unit != ROOT},
    }


def _points(spans: Sequence[Span], unit: str) -> dict[str, list[list[float]]]:
    """The corners of two lines over time, [seconds, fraction]: parameters and gradients that are held."""
    own = [span for span in spans if span.event.module == unit]
    # a unit without elements gathers no bytes
    gathers = (s.event for s in own if s.event.kind == "all_gather" and s.event.bytes_out)
    shard = next((event.bytes_in / event.bytes_out for event in gathers), 0.0)
    lines = {"parameters": [[0.0, round(shard, 4)]], "gradients": [[0.0, 0.0]]}
    copies = 0  # full parameters that are gathered or being gathered

    def to(line: list[list[float]], span: Span, fraction: float) -> None:
        for corner in ([_rounded(span.start), line[-1][1]], [_rounded(span.end), round(fraction, 4)]):
            if corner != line[-1]:
                line.append(corner)

    for span in sorted(own, key=lambda span: (span.start, span.end)):
        kind = span.event.kind
        if kind == "all_gather":
            copies += 1
            to(lines["parameters"], span, 1.0)
        elif kind == FREE and copies:
            copies -= 1
            to(lines["parameters"], span, 1.0 if copies else shard)
        elif kind == COMPUTE and span.event.phase == "backward":
            to(lines["gradients"], span, 1.0)
        elif kind == "reduce_scatter":
            to(lines["gradients"], span, shard)
    return lines


def _rounded(seconds: float) -> float:
    """Six digits: far less than a pixel."""
    return float(f"{seconds:.6g}")
