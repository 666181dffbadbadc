"""Time lines: one lane for computation, the others for communication, units coloured alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from fsdp_utils.collectives.trace import COMPUTE
from fsdp_utils.sharding.units import ROOT

# Told apart with any kind of colour vision (Okabe and Ito, "Color Universal Design", 2008).
COLORS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442")
INK, OTHER, CARD = "#2b2b2b", "#a8a8a2", "#fbfbf8"  # a light card is legible on light and dark pages alike
LEGEND = 8  # units that get a line in the legend
HATCH = {"reduce_scatter": "////", "all_reduce": "xxxx"}  # gradients, where they share a lane with gathers


class Bar(NamedTuple):
    """What ran for which unit, from when to when, in seconds."""

    kind: str
    unit: str
    start: float
    end: float


def plot_bars(
    bars: Sequence[Bar],
    units: Sequence[str],
    *,
    title: str,
    until: float | None = None,
    one_communication_lane: bool = False,
) -> Figure:
    """Draw them on a time axis.

    Args:
        bars: In any order.
        units: Names, in the model's order; each gets a colour. All others are grey.
        title: Over the figure.
        until: Seconds that the axis shows; by default, all.
        one_communication_lane: All collectives in one lane, told apart by hatching.

    Returns:
        The figure; nothing is shown.
    """
    figure = Figure(figsize=(9.6, 2.4), layout="constrained", facecolor=CARD)
    axes = figure.subplots()
    kinds = list(dict.fromkeys(bar.kind for bar in bars if bar.kind != COMPUTE))
    lanes = {COMPUTE: 0, **{kind: 1 if one_communication_lane else 1 + i for i, kind in enumerate(kinds)}}
    begin = min((bar.start for bar in bars), default=0.0)
    length = max((bar.end for bar in bars), default=begin) - begin
    unit_of_time, scale = time_unit(length if until is None else until)
    draw_bars(axes, bars, units, lanes, begin=begin, scale=scale, hatched=one_communication_lane)
    names = ["compute", "communication"] if one_communication_lane and kinds else [*lanes]
    axes.set_yticks(range(len(names)), [name.replace("_", "-") for name in names])
    axes.set(ylim=(len(names) - 0.5, -0.5), xlim=(0, (until or length or 1.0) * scale * 1.01))
    axes.set_xlabel(unit_of_time)
    axes.set_title(title, fontsize=10, fontweight="bold", color=INK)
    shown = [unit for unit in units if unit != ROOT][:LEGEND]
    handles = [Patch(color=color_of(unit, units), label=unit) for unit in shown]
    if any(color_of(bar.unit, units) == OTHER and bar.end > bar.start for bar in bars):
        handles.append(Patch(color=OTHER, label="other modules"))
    if one_communication_lane:
        handles += [
            Patch(facecolor=CARD, edgecolor=INK, hatch=HATCH[kind], label=kind.replace("_", "-"))
            for kind in kinds
            if kind in HATCH
        ]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles) or 1, frameon=False)
    return figure


def draw_bars(
    axes: Axes,
    bars: Sequence[Bar],
    units: Sequence[str],
    lanes: dict[str, int],
    *,
    begin: float,
    scale: float,
    hatched: bool,
) -> None:
    """Draw them into axes without frame and ticks.

    Args:
        axes: Changed in place.
        bars: What to draw.
        units: Names, in the model's order.
        lanes: By kind of bar, its lane.
        begin: What stands at 0, in seconds.
        scale: Units of the axis in a second.
        hatched: Tell kinds apart by hatching.
    """
    thin = 0.004 * max((bar.end - begin for bar in bars), default=0.0)  # its border would cover such a bar
    for bar in bars:
        color = color_of(bar.unit, units)
        box = Rectangle(  # barh looks for new limits each time, which takes most of the time of a film
            ((bar.start - begin) * scale, lanes[bar.kind] - 0.4),
            (bar.end - bar.start) * scale,
            0.8,
            facecolor=color,
            edgecolor=CARD if bar.end - bar.start > thin else color,
            linewidth=0.6,
            hatch=HATCH.get(bar.kind) if hatched else None,
        )
        axes.add_patch(box)
    axes.set_facecolor(CARD)
    axes.tick_params(length=0, colors=INK)
    axes.spines[:].set_visible(False)


def color_of(unit: str, units: Sequence[str]) -> str:
    """The colour of a unit; the root and what is no unit are grey."""
    if unit not in units or unit == ROOT:
        return OTHER
    return COLORS[[name for name in units if name != ROOT].index(unit) % len(COLORS)]


def time_unit(seconds: float) -> tuple[str, float]:
    """The name of a unit that suits so many seconds, and how many of it a second has."""
    if seconds >= 1:
        return "seconds", 1.0
    return ("milliseconds", 1e3) if seconds >= 1e-3 else ("microseconds", 1e6)
