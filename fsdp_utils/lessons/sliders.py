"""Sliders over a grid of results: a figure that a page draws anew while the reader moves them."""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple

from matplotlib.ticker import MaxNLocator

from fsdp_utils.collectives.interactive import Interactive
from fsdp_utils.lessons import plots

LIMIT_COLOR = "#B34700"


class Axis(NamedTuple):
    """One slider: what it sets, its values in order, their unit, and the place of the value shown first."""

    name: str
    values: Sequence[str | int | float]
    unit: str = ""
    start: int = 0


class Stack(NamedTuple):
    """The columns of the figure."""

    name: str  # the sum of the parts' name
    unit: str  # every part's unit
    parts: Mapping[str, str]  # by name, from the bottom up, their colors
    upto: float  # the fixed upper end of the axis: a higher column is cut there
    limit: float | None = None  # drawn as a line
    limit_name: str = ""


class Point(NamedTuple):
    """One result: a number for each part of the stack, one for each scalar, and where they are from."""

    parts: Sequence[float]
    scalars: Sequence[float] = ()
    note: str = ""


class Sliders(Interactive):
    """A grid of results, drawn anew as sliders are moved. See `explore`."""

    SCRIPT = "fsdp_utils.lessons", "sliders.js"


def explore(
    title: str,
    axes: Sequence[Axis],
    stack: Stack,
    at: Callable[..., Point | str],
    *,
    scalars: Mapping[str, str],
    over: str,
    digits: int = 4,
) -> Sliders:
    """Show results under sliders: one for each axis, and columns side by side over one of the axes.

    Args:
        title: Says whether the results are measured, simulated or calculated.
        axes: The sliders.
        stack: The columns.
        at: Called with each combination of values. Returns the result, or why there is none.
        scalars: By name, the units of more numbers of each result, which are written below the figure.
        over: Name of the axis whose values stand side by side.
        digits: Significant digits that are stored of each number. Fewer make the page smaller.

    Example::

        explore(
            "calculated: bytes at rest",
            [Axis("ranks", [1, 2, 4, 8])],
            Stack("held by a rank", "GiB", {"shards": "#0072B2"}, upto=16),
            lambda ranks: Point([16 / ranks]),
            scalars={},
            over="ranks",
        )
    """
    width = len(stack.parts) + len(scalars)
    rows: list[list[float | None]] = []
    notes: dict[str, int] = {}  # each once, with its place
    note: list[int] = []
    for values in product(*(axis.values for axis in axes)):
        point = at(*values)
        if isinstance(point, str):
            said, row = point, [None] * width
        else:
            said, row = point.note, [_rounded(number, digits) for number in (*point.parts, *point.scalars)]
        rows.append([*row])
        note.append(notes.setdefault(said, len(notes)))
    data: dict[str, Any] = {
        "title": title,
        "axes": [
            {**axis._asdict(), "values": [v if isinstance(v, str) else f"{v:,}" for v in axis.values]}
            for axis in axes
        ],
        "over": [axis.name for axis in axes].index(over),
        "stack": {**stack._asdict(), "parts": list(stack.parts), "colors": list(stack.parts.values())},
        "ticks": _ticks(stack.upto),
        "scalars": [list(pair) for pair in scalars.items()],
        "columns": [list(column) for column in zip(*rows, strict=True)],
        "notes": list(notes),
        "note": note,
    }
    data["id"] = "s" + hashlib.sha256(json.dumps(data).encode()).hexdigest()[:12]
    return Sliders(data, _text(data), _picture(data))


def _rounded(number: float, digits: int = 4) -> float | int:
    rounded = float(f"{number:.{digits}g}") if abs(number) > 1e-12 else 0.0  # less is an error of rounding
    return int(rounded) if rounded.is_integer() else rounded


def _short(number: float) -> str:
    return f"{float(f'{number:.3g}'):,.10g}"


def _ticks(upto: float) -> list[float]:
    ticks = MaxNLocator(5, steps=[1, 2, 5, 10]).tick_values(0, upto)
    return [_rounded(tick) for tick in ticks if tick <= upto]


def _numbers(data: dict[str, Any], places: Mapping[str, int]) -> tuple[list[float | None], str]:
    """The numbers and the note where some axes stand at these places, and the others at their start."""
    index = 0  # the grid lies in rows, the last axis fastest
    for axis in data["axes"]:
        index = index * len(axis["values"]) + places.get(axis["name"], axis["start"])
    return [column[index] for column in data["columns"]], data["notes"][data["note"][index]]


def _text(data: dict[str, Any]) -> str:
    """The values of the sliders, and the numbers at the start."""
    axes, stack = data["axes"], data["stack"]
    lines = [data["title"]]
    lines += [f"  {axis['name']}: {' | '.join(axis['values'])} {axis['unit']}" for axis in axes]
    lines.append("at " + ", ".join(axis["values"][axis["start"]] for axis in axes))
    numbers, note = _numbers(data, {})
    named = [*((part, stack["unit"]) for part in stack["parts"]), *data["scalars"]]
    for (name, unit), number in zip(named, numbers, strict=True):
        lines.append(f"  {name}: " + ("none" if number is None else f"{_short(number)} {unit}"))
    lines.append(f"  {note}")
    return "\n".join(line.rstrip() for line in lines if line.strip())


def _picture(data: dict[str, Any]) -> bytes:
    stack, over = data["stack"], data["axes"][data["over"]]
    figure, (axes,) = plots.figure(width=9.6, height=3.2)
    for place in range(len(over["values"])):
        numbers, _ = _numbers(data, {over["name"]: place})
        parts = [number for number in numbers[: len(stack["parts"])] if number is not None]
        bottom = 0.0
        for color, part in zip(stack["colors"], parts, strict=False):
            axes.bar(place, part, bottom=bottom, width=0.6, color=color)
            bottom += part
        text = f"{'▲ ' if bottom > stack['upto'] else ''}{_short(bottom)}" if parts else "none"
        axes.text(place, min(bottom, stack["upto"] * 0.94), text, ha="center", va="bottom", fontsize=8)
    handles: list[Any] = [
        plots.Patch(color=c, label=n) for n, c in zip(stack["parts"], stack["colors"], strict=True)
    ]
    if stack["limit"] is not None:
        line = axes.axhline(stack["limit"], color=LIMIT_COLOR, lw=1.2, ls="--", label=stack["limit_name"])
        handles.insert(0, line)
    others = [axis for axis in data["axes"] if axis is not over]
    start = ", ".join(f"{axis['name']} {axis['values'][axis['start']]}" for axis in others)
    axes.set(xticks=range(len(over["values"])), xticklabels=over["values"], ylim=(0, stack["upto"]))
    axes.set(xlabel=f"{over['name']} {over['unit']}".strip(), ylabel=f"{stack['name']}, {stack['unit']}")
    axes.set_title(data["title"] + (f"\n{start}" if start else ""))
    axes.legend(handles=handles[::-1], loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize="small")
    picture = plots.show(figure, alt=data["title"]).data
    assert isinstance(picture, bytes)
    return picture
