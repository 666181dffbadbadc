"""Draw when events ran on a time axis, with a colour for each unit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from fsdp_utils.collectives.events import COMPUTE, Span
from fsdp_utils.sharding.units import ROOT

# Told apart with any kind of colour vision (Okabe and Ito, "Color Universal Design", 2008).
COLORS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442")
INK, OTHER, CARD = "#2b2b2b", "#a8a8a2", "#fbfbf8"  # a light card is legible on light and dark pages alike
OWN = "in the model"  # the lane of what the model itself sends
LEGEND = 8  # units that get a line in the legend
HATCH = {"reduce_scatter": "////", "all_reduce": "xxxx"}  # gradients, where they share a lane with gathers


def timeline(
    spans: Sequence[Span],
    units: Sequence[str],
    *,
    title: str,
    until: float | None = None,
    one_communication_lane: bool = False,
) -> Figure:
    """Draw spans on a time axis.

    Args:
        spans: In any order, without what was freed.
        units: Names, in the model's order; each gets a colour. All others are grey.
        title: Over the figure.
        until: Seconds that the axis shows; by default, all.
        one_communication_lane: All collectives of FSDP and DDP in one lane, told apart by hatching, and those
            of the model itself in another.

    Returns:
        The figure; nothing is shown.
    """
    figure = Figure(figsize=(9.6, 2.4), layout="constrained", facecolor=CARD)
    _timeline(figure.subplots(), spans, units, title, until, one_communication_lane)
    _legend(figure, spans, units, hatched=one_communication_lane)
    return figure


def timelines(runs: Mapping[str, Sequence[Span]], units: Sequence[str], *, until: float) -> Figure:
    """Draw several runs, by title, one above the other on one time axis; arguments as for `timeline`."""
    figure = Figure(figsize=(9.6, 0.9 + 1.5 * len(runs)), layout="constrained", facecolor=CARD)
    for axes, (title, spans) in zip(
        figure.subplots(len(runs), squeeze=False)[:, 0], runs.items(), strict=True
    ):
        _timeline(axes, spans, units, title, until, one_communication_lane=True)
    _legend(figure, [span for spans in runs.values() for span in spans], units, hatched=True)
    return figure


def _timeline(
    axes: Axes,
    spans: Sequence[Span],
    units: Sequence[str],
    title: str,
    until: float | None,
    one_communication_lane: bool,
) -> None:
    kinds = _kinds(spans)
    lanes = {COMPUTE: 0, **{kind: 1 if one_communication_lane else 1 + i for i, kind in enumerate(kinds)}}
    own = [span.event for span in spans if span.event.is_of_the_model] if one_communication_lane else []
    if own:
        lanes[OWN] = 2
    begin = min((span.start for span in spans), default=0.0)
    length = max((span.end for span in spans), default=begin) - begin
    unit_of_time, scale = time_unit(length if until is None else until)
    _draw(axes, spans, units, lanes, begin=begin, scale=scale, hatched=one_communication_lane)
    names = ["compute", "communication"] if one_communication_lane and kinds else [*lanes]
    if own:
        names.append(", ".join(dict.fromkeys(event.dimension for event in own if event.dimension)) or OWN)
    axes.set_yticks(range(len(names)), [name.replace("_", "-") for name in names])
    axes.set(ylim=(len(names) - 0.5, -0.5), xlim=(0, (until or length or 1.0) * scale * 1.01))
    axes.set_xlabel(unit_of_time)
    axes.set_title(title, fontsize=10, fontweight="bold", color=INK)


def _legend(figure: Figure, spans: Sequence[Span], units: Sequence[str], *, hatched: bool) -> None:
    shown = [unit for unit in units if unit != ROOT][:LEGEND]
    handles = [Patch(color=color(unit, units), label=unit) for unit in shown]
    if any(color(span.event.module, units) == OTHER and span.end > span.start for span in spans):
        handles.append(Patch(color=OTHER, label="other modules"))
    if hatched:
        handles += [
            Patch(facecolor=CARD, edgecolor=INK, hatch=HATCH[kind], label=kind.replace("_", "-"))
            for kind in _kinds(spans)
            if kind in HATCH
        ]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles) or 1, frameon=False)


def _kinds(spans: Sequence[Span]) -> list[str]:
    """Of collectives, in the order in which they come."""
    return list(dict.fromkeys(span.event.kind for span in spans if span.event.kind != COMPUTE))


def _draw(
    axes: Axes,
    spans: Sequence[Span],
    units: Sequence[str],
    lanes: dict[str, int],
    *,
    begin: float,
    scale: float,
    hatched: bool,
) -> None:
    """Draw spans into axes that begin at `begin` seconds and have `scale` units in a second."""
    thin = 0.004 * max((span.end - begin for span in spans), default=0.0)  # a border would cover such a bar
    for span in spans:
        kind, shade = span.event.kind, color(span.event.module, units)
        box = Rectangle(  # barh computes new limits each time, which takes most of the time of an animation
            ((span.start - begin) * scale, _lane(span, lanes) - 0.4),
            (span.end - span.start) * scale,
            0.8,
            facecolor=shade,
            edgecolor=CARD if span.end - span.start > thin else shade,
            linewidth=0.6,
            hatch=HATCH.get(kind) if hatched else None,
        )
        axes.add_patch(box)
    _without_frame(axes)


def _lane(span: Span, lanes: dict[str, int]) -> int:
    return lanes[OWN if span.event.is_of_the_model and OWN in lanes else span.event.kind]


def _without_frame(axes: Axes) -> None:
    axes.set_facecolor(CARD)
    axes.tick_params(length=0, colors=INK)
    axes.spines[:].set_visible(False)


def color(unit: str, units: Sequence[str]) -> str:
    """The root, and what is no unit, are grey."""
    if unit not in units or unit == ROOT:
        return OTHER
    return COLORS[[name for name in units if name != ROOT].index(unit) % len(COLORS)]


def time_unit(seconds: float) -> tuple[str, float]:
    """The name of a unit that suits so many seconds, and how many of it a second has."""
    if seconds >= 1:
        return "seconds", 1.0
    return ("milliseconds", 1e3) if seconds >= 1e-3 else ("microseconds", 1e6)
