"""A step as a film: what one rank holds of each unit while two streams run."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import NamedTuple

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from PIL import Image

from fsdp_utils.collectives.plot import CARD, INK, Bar, color_of, draw_bars, time_unit
from fsdp_utils.collectives.replay import Replay, Span
from fsdp_utils.collectives.trace import COMPUTE, FREE
from fsdp_utils.sharding.units import ROOT

PIXELS_PER_INCH = 80
COLORS_KEPT = 32  # a small palette makes a small file
FRAME_MS, LAST_FRAME_MS = 180, 2000


class Held(NamedTuple):
    """What a rank holds of one unit: parts of the whole, 0 to 1."""

    parameters: float
    gradients: float
    computing: bool


def film(replay: Replay, *, title: str, frames: int, until: float) -> bytes:
    """Draw a replay as an animated PNG.

    Args:
        replay: Of one step, with at least one FSDP unit.
        title: Over each picture.
        frames: How many pictures, at least 2.
        until: Seconds that they show.

    Returns:
        The PNG.

    Raises:
        ValueError: there is no unit to show, or there are too few frames.
    """
    units = [unit for unit in replay.units if unit != ROOT]
    if not units or frames < 2:
        raise ValueError(
            f"animate: expected at least 1 FSDP unit and 2 frames, found {len(units)} and {frames}. DDP "
            "gathers and frees nothing: use plot()."
        )
    moments = [until * frame / (frames - 1) for frame in range(frames)]
    with mpl.rc_context({"font.family": "DejaVu Sans", "font.size": 9, "hatch.linewidth": 0.8}):
        pictures = [_picture(replay, units, moment, title, until) for moment in moments]
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
    copies: list[float] = []  # of the whole, on their way or there; the last one while it is not freed
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


def _picture(replay: Replay, units: Sequence[str], moment: float, title: str, until: float) -> Image.Image:
    figure = Figure(figsize=(8.0, 3.3), dpi=PIXELS_PER_INCH, facecolor=CARD)
    canvas = FigureCanvasAgg(figure)
    figure.suptitle(title, x=0.02, ha="left", fontsize=10, fontweight="bold", color=INK)
    _memory(figure.add_axes((0.13, 0.42, 0.85, 0.46)), replay, units, moment)
    _streams(figure.add_axes((0.13, 0.15, 0.85, 0.23)), replay, moment, until)
    canvas.draw()
    return Image.fromarray(np.asarray(canvas.buffer_rgba())).convert("RGB")


def _memory(axes: Axes, replay: Replay, units: Sequence[str], moment: float) -> None:
    for column, unit in enumerate(units):
        seen, color = held(replay.spans, unit, moment), color_of(unit, units)
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
    axes.set_facecolor(CARD)
    axes.tick_params(length=0, colors=INK)
    axes.spines[:].set_visible(False)


def _streams(axes: Axes, replay: Replay, moment: float, until: float) -> None:
    bars = [
        Bar(span.event.kind, span.event.module, span.start, min(span.end, moment))
        for span in replay.spans
        if span.end > span.start and span.start < moment
    ]
    lanes = {COMPUTE: 0, **{bar.kind: 1 for bar in bars if bar.kind != COMPUTE}}
    unit_of_time, scale = time_unit(until)
    draw_bars(axes, bars, replay.units, lanes, begin=0.0, scale=scale, hatched=True)
    axes.axvline(moment * scale, color=INK, linewidth=1)
    axes.set(xlim=(0, until * scale * 1.01), ylim=(1.5, -0.5))
    axes.set_yticks([0, 1], ["compute", "communication"])
    axes.set_xlabel(f"{unit_of_time} in the replay (hatched: gradients)", color=INK)
