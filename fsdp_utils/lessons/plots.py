"""The figures of the lessons, in one style: what each rank holds, and how FSDP units compare."""

import io
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import matplotlib as mpl
import numpy as np
from IPython.display import Image
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from PIL import Image as PillowImage

# Told apart with any kind of colour vision (Okabe and Ito, "Color Universal Design", 2008).
RANK_COLORS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#000000")
INK, FAINT, CARD = "#2b2b2b", "#d9d9d4", "#fbfbf8"  # a light card is legible on light and dark pages alike
PIXELS_PER_INCH, SHARPNESS = 96, 2  # as a browser counts inches; twice the dots for sharp screens
COLORS_KEPT = 64  # a palette makes the PNG about a third as large, and nobody sees the difference

STYLE: dict[Any, Any] = {
    **dict.fromkeys(["figure.facecolor", "axes.facecolor"], CARD),
    **dict.fromkeys(["axes.labelcolor", "axes.titlecolor", "text.color", "xtick.color", "ytick.color"], INK),
    **dict.fromkeys(["axes.spines.top", "axes.spines.right", "legend.frameon"], False),
    **dict.fromkeys(["figure.constrained_layout.use", "axes.axisbelow"], True),
    "axes.edgecolor": FAINT,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "font.family": "DejaVu Sans",  # comes with matplotlib: the same letters on every machine
    "font.size": 9,
    "hatch.linewidth": 0.8,
}
in_look = mpl.rc_context(STYLE)  # decorates what draws, whatever the reader's own matplotlib settings


@in_look
def figure(columns: int = 1, *, width: float = 8.0, height: float = 3.0) -> tuple[Figure, list[Axes]]:
    """Return an empty figure in the lessons' look, so many inches large, and its axes from left to right."""
    fig = Figure(figsize=(width, height))
    return fig, list(fig.subplots(1, columns, squeeze=False)[0])


@in_look
def show(fig: Figure, *, alt: str) -> Image:
    """Turn a figure into a small PNG whose bytes depend only on what is drawn; `alt` says what that is."""
    for axes in fig.axes:  # a title that a lesson set outside of this module has matplotlib's own look
        size = min(axes.title.get_fontsize(), STYLE["axes.titlesize"])
        axes.title.set(fontsize=size, fontweight=STYLE["axes.titleweight"], color=INK)
    raw = io.BytesIO()
    fig.savefig(raw, dpi=PIXELS_PER_INCH * SHARPNESS)
    small = io.BytesIO()
    picture = PillowImage.open(raw).convert("RGB").quantize(COLORS_KEPT, dither=PillowImage.Dither.NONE)
    picture.save(small, "PNG", optimize=True)  # no date, no version of matplotlib
    return Image(small.getvalue(), width=picture.width // SHARPNESS, metadata={"alt": alt})


@in_look
def life_of_a_unit(world_size: int = 4) -> Image:
    """Draw the parameters and gradients of one FSDP unit on each rank during a step: not a measurement."""
    moments = {
        "shard, at rest": ("mine", "none"),
        "gather, forward": ("all", "none"),
        "free": ("mine", "none"),
        "gather again": ("all", "none"),
        "backward": ("all", "all"),
        "reduce, free": ("mine", "mine"),
    }
    ranks = range(world_size)
    fig, panels = figure(len(moments), width=9.6, height=0.42 * world_size + 1.1)
    for axes, (title, (parameters, gradients)) in zip(panels, moments.items(), strict=True):
        look: dict[str, Any] = {"facecolor": CARD, "linewidth": 1.5, "height": 0.3}
        look["hatch"] = "////" if gradients == "all" else ""
        for rank in ranks:
            for piece in ranks:
                color = _color(piece) if parameters == "all" or piece == rank else FAINT
                axes.barh(rank - 0.19, 0.94, left=piece, height=0.34, color=color)
                if gradients == "all" or (gradients == "mine" and piece == rank):
                    axes.barh(rank + 0.19, 0.94, left=piece, edgecolor=_color(piece), **look)
        axes.set_title(title, fontsize=9)
        axes.set_xlim(-0.1, world_size)
        _rows(axes, [f"rank {rank}" for rank in ranks], shown=axes is panels[0])
    handles = [
        Patch(facecolor=INK, label="parameters, a colour for each piece"),
        Patch(facecolor=CARD, edgecolor=INK, hatch="////", label="gradients of this rank's samples"),
        Patch(facecolor=CARD, edgecolor=INK, label="gradients, mean over all ranks"),
    ]
    fig.legend(handles=handles, loc="outside lower center", ncols=3)
    alt = "A unit's shards, gathered for forward and backward, and its gradients reduced and scattered."
    return show(fig, alt=alt)


@in_look
def life_of_a_run(starts: Sequence[Mapping[str, Any]], *, every: int, unit: str, alt: str) -> Image:
    """Draw the steps of a run over time with its checkpoints, one each `every` steps, and its processes.

    Each start of the run has its number of "ranks"; "begun" and "ended", when its processes began and ended;
    "points", a list of (time, steps done) from the first step on; "killed", the rank that was, or None.
    """
    fig = Figure(figsize=(9.0, 4.2))
    steps, lanes = fig.subplots(2, 1, sharex=True, height_ratios=[3, 1.3])
    square = {"marker": "s", "color": INK, "markersize": 6, "linestyle": ""}
    cross = {"marker": "X", "color": RANK_COLORS[5], "markersize": 11, "linestyle": ""}
    striped: dict[str, Any] = {"hatch": "////", "edgecolor": CARD}
    for index, start in enumerate(starts):
        color, begun, ranks = _color(index), start["begun"], range(start["ranks"])
        times, done = zip(*start["points"], strict=True)
        steps.plot(times, done, color=color, linewidth=2.5, label=f"steps done, {start['ranks']} ranks")
        lanes.barh(ranks, start["ended"] - begun, left=begun, height=0.7, color=color)
        lanes.barh(ranks, times[0] - begun, left=begun, height=0.7, color=color, **striped)
        saved = [step for step in range(every, done[-1] + 1, every) if step > done[0]]
        steps.plot(np.interp(saved, done, times), saved, label="" if index else "checkpoint", **square)
    for before, after in pairwise(starts):
        (t, last), (u, first) = before["points"][-1], after["points"][0]
        steps.plot(t, last, label=f"rank {before['killed']} killed", **cross)
        lanes.plot(t, before["killed"], **cross)
        steps.plot([t, t, u], [last, first, first], color=INK, linestyle=":", linewidth=1.2)
        steps.text(t, (last + first) / 2, f"  steps {first + 1} to {last}\n  trained twice", va="center")
        steps.text(u, first, f" resumed\n at step {first}", va="top")
    steps.set(ylabel="step", ylim=(-2, None))
    most = max(start["ranks"] for start in starts)
    lanes.set_yticks(range(most), [f"rank {rank}" for rank in range(most)])
    lanes.set(ylim=(most - 0.4, -0.6), xlabel=unit)
    handles, _ = steps.get_legend_handles_labels()
    handles.append(Patch(facecolor=FAINT, label="process starts and loads", **striped))
    fig.legend(handles=handles, loc="outside lower center", ncols=5, fontsize=8)
    return show(fig, alt=alt)


@in_look
def amounts(panels: Mapping[str, Mapping[str, Mapping[str, float]]], *, unit: str, alt: str = "") -> Image:
    """Draw several amounts of the same ways to train, each in a panel with its scale.

    A panel has an amount by the name of a way, then of a part. The parts of a way are laid end to end, with
    their sum after them.
    """
    names = list(next(iter(panels.values())))
    fig, axes_of = figure(len(panels), width=9.0, height=0.34 * len(names) + 1.1)
    colors: dict[str, str] = {}
    for axes, (title, ways) in zip(axes_of, panels.items(), strict=True):
        for row, parts in enumerate(ways.values()):
            total = 0.0
            for part, size in parts.items():
                color = colors.setdefault(part, _color(len(colors)))
                axes.barh(row, size, left=total, height=0.7, color=color, edgecolor=CARD)
                total += size
            axes.text(total, row, f" {total:,.{0 if total >= 100 else 1}f}", va="center")
        _rows(axes, names, shown=axes is axes_of[0])
        axes.set_title(f"{title}, {unit}")
        axes.margins(x=0.22)
    handles = [Patch(color=color, label=name) for name, color in colors.items()]
    fig.legend(handles=handles, loc="outside lower center", ncols=len(handles))
    return show(fig, alt=alt or f"{', '.join(panels)} in {unit}: {'; '.join(names)}.")


@in_look
def alive(
    curves: Mapping[str, Sequence[int]],
    *,
    whole_model: int,
    what: str = "full parameters",
    forward: Sequence[int] = (),
) -> Image:
    """Draw the share of the model that is gathered at each moment of a training step, by way to shard.

    A curve has the bytes, of what the y axis names, that were alive after each operation of the step.
    `forward` has the number of operations in the forward of each curve; a line then stands after them.
    """
    shares = {title: [100 * nbytes / whole_model for nbytes in curve] for title, curve in curves.items()}
    top = 25 + max(100.0, *map(max, shares.values()))
    fig, panels = figure(len(curves), width=2.0 * len(curves) + 0.6, height=2.5)
    for index, (axes, (title, percent)) in enumerate(zip(panels, shares.items(), strict=True)):
        axes.fill_between(range(len(percent)), percent, step="post", color=_color(index), linewidth=0)
        axes.axhline(100, color=INK, linestyle="--", linewidth=0.8)
        peak = max(percent)
        above = peak + 0.024 * top
        box = {"facecolor": CARD, "edgecolor": CARD, "pad": 0} if forward else None  # over the line
        axes.text(len(percent) / 2, above, f"peak {peak:.0f}%", ha="center", fontweight="bold", bbox=box)
        axes.set(title=title, ylim=(0, top), xlim=(0, len(percent)), xticks=[])
        axes.set_xlabel("operations of one step")
        ticks = range(0, int(top), 50)
        axes.set_yticks(ticks, [str(tick) for tick in ticks] if axes is panels[0] else [""] * len(ticks))
        axes.spines["left"].set_visible(False)
        if forward:
            axes.axvline(forward[index], color=INK, linewidth=0.8)
            middles = [forward[index] / 2, (forward[index] + len(percent)) / 2]
            axes.set_xticks(middles, ["forward", "backward"])
        axes.tick_params(length=0)
    panels[0].set_ylabel(f"{what}, % of model")
    return show(fig, alt=f"Share of the model that is whole during a step: {', '.join(curves)}.")


@in_look
def layers(
    ways: Mapping[str, Mapping[str, str]], *, above: Sequence[str], below: Sequence[str], alt: str
) -> Image:
    """Draw what several programs have in each layer, side by side, between bands that all of them share."""
    names = list(next(iter(ways.values())))
    # light shades, on which dark letters can be read
    tints = [tuple(0.28 * c + 0.72 for c in to_rgb(_color(column))) for column in range(len(ways))]
    rows = {
        **{text: [text] for text in above},
        "": list(ways),
        **{name: [has[name] for has in ways.values()] for name in names},
        **{text: [text] for text in below},
    }
    fig, (axes,) = figure(width=9.0, height=0.42 * len(rows) + 0.1)
    for row, texts in enumerate(rows.values()):
        colors, width = (tints, 1) if len(texts) == len(ways) else ([FAINT], len(ways))
        drawn = axes.barh(
            [row] * len(texts), width, left=range(len(texts)), color=colors, height=0.84, edgecolor=CARD
        )
        weight = "bold" if texts == list(ways) else "normal"
        axes.bar_label(drawn, texts, label_type="center", fontsize=9, color=INK, weight=weight)
    _rows(axes, [name if name in names else "" for name in rows])
    axes.set_xlim(0, len(ways))
    return show(fig, alt=alt)


@in_look
def resharding(rows: int, *, saved_by: int, wanted_by: int) -> Image:
    """Draw which rows of one weight each rank has saved, and in whose files other ranks find theirs."""

    def cut(ranks: int) -> list[tuple[int, int]]:
        size = -(-rows // ranks)
        return [(min(rank * size, rows), min((rank + 1) * size, rows)) for rank in range(ranks)]

    fig, (axes,) = figure(width=7.5, height=2.2)
    for index, (begin, end) in enumerate(cut(saved_by)):
        color = RANK_COLORS[index]
        label = "white" if sum(to_rgb(color)) < 1.5 else INK
        axes.barh(0, end - begin, left=begin, height=0.5, color=color, edgecolor=CARD)
        axes.text(begin + rows / 85, 0, f"file {index}: {begin} to {end - 1}", va="center", color=label)
        for first, stop in cut(wanted_by):
            left, right = max(first, begin), min(stop, end)
            axes.barh(1, max(right - left, 0), left=left, height=0.5, color=color, alpha=0.5)
    for rank, (first, stop) in enumerate(cut(wanted_by)):
        axes.barh(1, stop - first, left=first, height=0.5, fill=False, edgecolor=INK, linewidth=1.5)
        axes.text((first + stop) / 2, 1, f"rank {rank}: rows {first} to {stop - 1}", ha="center", va="center")
    axes.set_yticks([0, 1], [f"saved by {saved_by} ranks", f"wanted by {wanted_by} ranks"])
    axes.set(ylim=(1.5, -0.5), xlabel="the rows of one weight")
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    alt = f"The rows of one weight, saved by {saved_by} ranks and wanted by {wanted_by}, from several files."
    return show(fig, alt=alt)


@in_look
def calls(panels: Mapping[str, Sequence[Sequence[str]]], *, first: Sequence[int], alt: str) -> Image:
    """Draw the calls of each rank in their order; an outline marks one that most ranks do not make.

    A panel has the texts of equally many calls for each rank; `first` has the number of its first call.
    """
    longest = [len(rows[0]) for rows in panels.values()]
    fig = Figure(figsize=(max(7.5, 0.6 * sum(longest) + 0.9), 2.4))
    axes_of = fig.subplots(1, len(panels), squeeze=False, width_ratios=[n + 0.8 for n in longest])[0]
    for axes, start, (title, rows) in zip(axes_of, first, panels.items(), strict=True):
        for place, column in enumerate(zip(*rows, strict=True)):
            usual = max(column, key=column.count)
            for rank, text in enumerate(column):
                odd = text != usual
                edge = {"edgecolor": RANK_COLORS[5] if odd else FAINT, "linewidth": 2.5 if odd else 0}
                face = CARD if odd else FAINT
                axes.barh(rank, 0.88, left=place - 0.44, height=0.74, facecolor=face, **edge)
                axes.text(place, rank, text, ha="center", va="center", fontsize=7)
        _rows(axes, [f"rank {rank}" for rank in range(len(rows))], shown=axes is axes_of[0])
        numbers = range(start, start + len(rows[0]))
        axes.set_xticks(range(len(numbers)), [f"call {n}" if n == start else str(n) for n in numbers])
        axes.set(xlim=(-0.6, len(numbers) - 0.4), title=title)
    return show(fig, alt=alt)


def _color(index: int) -> str:
    return RANK_COLORS[index % len(RANK_COLORS)]


def _rows(axes: Axes, names: Sequence[str], *, shown: bool = True) -> None:
    """Name the rows from top to bottom, without ticks, scale and frame."""
    axes.set_yticks(range(len(names)), names if shown else [""] * len(names))
    axes.set_xticks([])
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
