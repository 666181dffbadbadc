"""Draw when events ran, with a colour for each unit: a timeline, or an animation of a replay."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from PIL import Image

from fsdp_utils.collectives.events import COMPUTE, FREE, Span
from fsdp_utils.sharding.units import ROOT

# Told apart with any kind of colour vision (Okabe and Ito, "Color Universal Design", 2008).
COLORS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442")
INK, OTHER, CARD = "#2b2b2b", "#a8a8a2", "#fbfbf8"  # a light card is legible on light and dark pages alike
OWN = "in the model"  # the lane of what the model itself sends
LEGEND = 8  # units that get a line in the legend
HATCH = {"reduce_scatter": "////", "all_reduce": "xxxx"}  # gradients, where they share a lane with gathers
PIXELS_PER_INCH = 80
COLORS_KEPT = 32  # a small palette makes a small file
FRAME_MS, LAST_FRAME_MS = 180, 2000


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
    axes = figure.subplots()
    kinds = list(dict.fromkeys(span.event.kind for span in spans if span.event.kind != COMPUTE))
    lanes = {COMPUTE: 0, **{kind: 1 if one_communication_lane else 1 + i for i, kind in enumerate(kinds)}}
    own = [span.event for span in spans if span.event.is_of_the_model] if one_communication_lane else []
    if own:
        lanes[OWN] = 2
    begin = min((span.start for span in spans), default=0.0)
    length = max((span.end for span in spans), default=begin) - begin
    time_unit, scale = _time_unit(length if until is None else until)
    _draw(axes, spans, units, lanes, begin=begin, scale=scale, hatched=one_communication_lane)
    names = ["compute", "communication"] if one_communication_lane and kinds else [*lanes]
    if own:
        names.append(", ".join(dict.fromkeys(event.dimension for event in own if event.dimension)) or OWN)
    axes.set_yticks(range(len(names)), [name.replace("_", "-") for name in names])
    axes.set(ylim=(len(names) - 0.5, -0.5), xlim=(0, (until or length or 1.0) * scale * 1.01))
    axes.set_xlabel(time_unit)
    axes.set_title(title, fontsize=10, fontweight="bold", color=INK)
    shown = [unit for unit in units if unit != ROOT][:LEGEND]
    handles = [Patch(color=_color(unit, units), label=unit) for unit in shown]
    if any(_color(span.event.module, units) == OTHER and span.end > span.start for span in spans):
        handles.append(Patch(color=OTHER, label="other modules"))
    if one_communication_lane:
        handles += [
            Patch(facecolor=CARD, edgecolor=INK, hatch=HATCH[kind], label=kind.replace("_", "-"))
            for kind in kinds
            if kind in HATCH
        ]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles) or 1, frameon=False)
    return figure


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
        kind, color = span.event.kind, _color(span.event.module, units)
        box = Rectangle(  # barh computes new limits each time, which takes most of the time of an animation
            ((span.start - begin) * scale, _lane(span, lanes) - 0.4),
            (span.end - span.start) * scale,
            0.8,
            facecolor=color,
            edgecolor=CARD if span.end - span.start > thin else color,
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


def _color(unit: str, units: Sequence[str]) -> str:
    """The root, and what is no unit, are grey."""
    if unit not in units or unit == ROOT:
        return OTHER
    return COLORS[[name for name in units if name != ROOT].index(unit) % len(COLORS)]


def _time_unit(seconds: float) -> tuple[str, float]:
    """The name of a unit that suits so many seconds, and how many of it a second has."""
    if seconds >= 1:
        return "seconds", 1.0
    return ("milliseconds", 1e3) if seconds >= 1e-3 else ("microseconds", 1e6)


# ---- animation -------------------------------------------------------------------------------------


class Held(NamedTuple):
    """What a rank holds of one unit: fractions of the full parameters and gradients, 0 to 1."""

    parameters: float
    gradients: float
    computing: bool


def animation(spans: Sequence[Span], units: Sequence[str], *, title: str, frames: int, until: float) -> bytes:
    """Draw a replayed step as an animated PNG: what one rank holds of each unit while two streams run.

    Args:
        spans: Of a replay, with at least one FSDP unit.
        units: Names of the units, in the model's order.
        title: Over each picture.
        frames: How many pictures, at least 2.
        until: Seconds that they show.

    Returns:
        The PNG.

    Raises:
        ValueError: there is no unit to show, or there are too few frames.
    """
    shown = [unit for unit in units if unit != ROOT]
    if not shown or frames < 2:
        raise ValueError(
            f"animate: expected at least 1 FSDP unit and 2 frames, found {len(shown)} and {frames}. DDP "
            "gathers and frees nothing: use plot()."
        )
    moments = [until * frame / (frames - 1) for frame in range(frames)]
    with mpl.rc_context({"font.family": "DejaVu Sans", "font.size": 9, "hatch.linewidth": 0.8}):
        pictures = [_picture(spans, shown, moment, title, until) for moment in moments]
    palette = pictures[len(pictures) // 2].quantize(COLORS_KEPT, dither=Image.Dither.NONE)
    small = [picture.quantize(palette=palette, dither=Image.Dither.NONE) for picture in pictures]
    file = io.BytesIO()
    small[0].save(
        file,
        "PNG",
        save_all=True,
        append_images=small[1:],
        duration=[FRAME_MS] * (frames - 1) + [LAST_FRAME_MS],
        loop=0,
        optimize=True,
    )
    return file.getvalue()


def held(spans: Sequence[Span], unit: str, moment: float) -> Held:
    """What a rank holds of a unit at a moment of the replay."""
    shard, gradients, computing = 0.0, 0.0, False
    copies: list[float] = []  # of the full parameters, gathered or being gathered; the last until it is freed
    for span in spans:
        event = span.event
        if event.module != unit:
            continue
        if event.kind == "all_gather":
            shard = shard or event.bytes_in / event.bytes_out
        begun = span.start <= moment
        done = float(begun)
        if begun and moment < span.end:
            done = (moment - span.start) / (span.end - span.start)
        if event.kind == "all_gather":
            copies.append(done)
        elif event.kind == FREE and begun and copies:
            copies[-1] = 0.0
        elif event.kind == COMPUTE and begun and event.phase in ("forward", "backward"):
            computing = computing or done < 1
            if event.phase == "backward":
                gradients = max(gradients, done)
        elif event.kind == "reduce_scatter" and begun:
            gradients = 1 - (1 - shard) * done
    parameters = shard + (1 - shard) * max(copies, default=0.0)
    return Held(parameters, gradients, computing)


def _picture(
    spans: Sequence[Span], units: Sequence[str], moment: float, title: str, until: float
) -> Image.Image:
    figure = Figure(figsize=(8.0, 3.3), dpi=PIXELS_PER_INCH, facecolor=CARD)
    canvas = FigureCanvasAgg(figure)
    figure.suptitle(title, x=0.02, ha="left", fontsize=10, fontweight="bold", color=INK)
    _draw_memory(figure.add_axes((0.13, 0.42, 0.85, 0.46)), spans, units, moment)
    _draw_streams(figure.add_axes((0.13, 0.15, 0.85, 0.23)), spans, units, moment, until)
    canvas.draw()
    return Image.fromarray(np.asarray(canvas.buffer_rgba())).convert("RGB")


def _draw_memory(axes: Axes, spans: Sequence[Span], units: Sequence[str], moment: float) -> None:
    for column, unit in enumerate(units):
        seen, color = held(spans, unit, moment), _color(unit, units)
        edge, width = (INK, 2.2) if seen.computing else (color, 0.8)
        axes.add_patch(Rectangle((column, -0.35), 0.9 * seen.parameters, 0.7, color=color))
        axes.add_patch(Rectangle((column, -0.35), 0.9, 0.7, fill=False, edgecolor=edge, linewidth=width))
        if seen.gradients:
            wide = 0.9 * seen.gradients
            axes.add_patch(
                Rectangle((column, 0.75), wide, 0.5, facecolor=CARD, edgecolor=color, hatch="////")
            )
        axes.text(column + 0.45, -0.6, unit, ha="center", color=INK)
    axes.set(xlim=(-0.05, len(units)), ylim=(1.5, -0.9), xticks=[])
    axes.set_yticks([0, 1], ["parameters", "gradients"])
    _without_frame(axes)


def _draw_streams(
    axes: Axes, spans: Sequence[Span], units: Sequence[str], moment: float, until: float
) -> None:
    so_far = [
        replace(span, end=min(span.end, moment))
        for span in spans
        if span.end > span.start and span.start < moment
    ]
    lanes = {COMPUTE: 0, **{span.event.kind: 1 for span in so_far if span.event.kind != COMPUTE}}
    time_unit, scale = _time_unit(until)
    _draw(axes, so_far, units, lanes, begin=0.0, scale=scale, hatched=True)
    axes.axvline(moment * scale, color=INK, linewidth=1)
    axes.set(xlim=(0, until * scale * 1.01), ylim=(1.5, -0.5))
    axes.set_yticks([0, 1], ["compute", "communication"])
    axes.set_xlabel(f"{time_unit} in the replay (hatched: gradients)", color=INK)
