"""Draw when events ran on a time axis, with a colour for each unit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from fsdp_utils.collectives.events import Span
from fsdp_utils.sharding.units import ROOT

# Told apart with any kind of colour vision (Okabe and Ito, "Color Universal Design", 2008).
COLORS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442")
INK, OTHER, CARD = "#2b2b2b", "#a8a8a2", "#fbfbf8"  # a light card is legible on light and dark pages alike
OWN = "in the model"  # the lane of what the model itself sends
LEGEND = 8  # units that get a line in the legend
HATCH = {"reduce_scatter": "////", "all_reduce": "xxxx"}  # gradients, where they share a lane with gathers


def timelines(
    runs: Mapping[str, Sequence[Span]], units: Sequence[str], *, until: float | None = None
) -> Figure:
    """Draw runs on time axes, one above the other, with a colour for each of the units."""
    figure = Figure(figsize=(9.6, 0.9 + 1.5 * len(runs)), layout="constrained", facecolor=CARD)
    panels = figure.subplots(len(runs), squeeze=False)[:, 0]
    for axes, (title, spans) in zip(panels, runs.items(), strict=True):
        _draw(axes, spans, units, until)
        axes.set_title(title, fontsize=10, fontweight="bold", color=INK)
    _legend(figure, [span for spans in runs.values() for span in spans], units)
    return figure


def _draw(axes: Axes, spans: Sequence[Span], units: Sequence[str], until: float | None) -> None:
    own = [span.event for span in spans if span.event.is_of_the_model]
    names = ["compute", "communication"] if any(span.event.is_collective for span in spans) else ["compute"]
    if own:
        names.append(", ".join(dict.fromkeys(event.dimension for event in own if event.dimension)) or OWN)
    begin = min((span.start for span in spans), default=0.0)
    length = max((span.end for span in spans), default=begin) - begin
    unit_of_time, scale = time_unit(length if until is None else until)
    for span in spans:
        shade, lane = color(span.event.module, units), span.event.is_collective + span.event.is_of_the_model
        box = Rectangle(  # barh computes new limits each time, which takes most of the time of an animation
            ((span.start - begin) * scale, lane - 0.4),
            (span.end - span.start) * scale,
            0.8,
            facecolor=shade,
            edgecolor=CARD if span.end - span.start > 0.004 * length else shade,  # or it would cover the bar
            linewidth=0.6,
            hatch=HATCH.get(span.event.kind),
        )
        axes.add_patch(box)
    axes.set_yticks(range(len(names)), names)
    axes.set(ylim=(len(names) - 0.5, -0.5), xlim=(0, (until or length or 1.0) * scale * 1.01))
    axes.set_xlabel(unit_of_time)
    axes.set_facecolor(CARD)
    axes.tick_params(length=0, colors=INK)
    axes.spines[:].set_visible(False)


def _legend(figure: Figure, spans: Sequence[Span], units: Sequence[str]) -> None:
    shown = [unit for unit in units if unit != ROOT][:LEGEND]
    handles = [Patch(color=color(unit, units), label=unit) for unit in shown]
    if any(color(span.event.module, units) == OTHER and span.end > span.start for span in spans):
        handles.append(Patch(color=OTHER, label="other modules"))
    handles += [
        Patch(facecolor=CARD, edgecolor=INK, hatch=hatch, label=kind.replace("_", "-"))
        for kind, hatch in HATCH.items()
        if any(span.event.kind == kind for span in spans)
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles) or 1, frameon=False)


def color(unit: str, units: Sequence[str]) -> str:
    """Draw the root, and modules outside units, in grey."""
    if unit not in units or unit == ROOT:
        return OTHER
    return COLORS[[name for name in units if name != ROOT].index(unit) % len(COLORS)]


def time_unit(seconds: float) -> tuple[str, float]:
    """The name of a unit that suits so many seconds, and how many of it a second has."""
    if seconds >= 1:
        return "seconds", 1.0
    return ("milliseconds", 1e3) if seconds >= 1e-3 else ("microseconds", 1e6)
