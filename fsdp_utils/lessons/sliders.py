"""Sliders over a grid of results: a figure that a page draws anew while the reader moves them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from math import prod
from typing import Any, NamedTuple

from matplotlib.ticker import MaxNLocator

from fsdp_utils.collectives.interactive import Interactive
from fsdp_utils.lessons import plots

MOST_POINTS = 10_000
LIMIT_COLOR = "#B34700"


class Axis(NamedTuple):
    """One slider.

    Args:
        name: what it sets.
        values: what it can be set to, in order.
        unit: of the values.
        start: the place of the value that is shown first.
    """

    name: str
    values: Sequence[str | int | float]
    unit: str = ""
    start: int = 0


class Stack(NamedTuple):
    """What the columns of the figure show.

    Args:
        name: of the sum of the parts.
        unit: of every part.
        parts: by name, from the bottom up, their colors.
        upto: the upper end of the axis, which stays where it is. A higher column is cut there.
        limit: is drawn as a line; None draws none.
        limit_name: what the line is.
    """

    name: str
    unit: str
    parts: Mapping[str, str]
    upto: float
    limit: float | None = None
    limit_name: str = ""


class Point(NamedTuple):
    """One result.

    Args:
        parts: as many as the stack has.
        scalars: as many as were announced.
        note: where the numbers are from, in a sentence.
    """

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
    scalars: Mapping[str, str] | None = None,
    over: str | None = None,
    digits: int = 4,
) -> Sliders:
    """Show results under sliders: one for each axis, and columns side by side over one of the axes.

    Args:
        title: over the figure. It should say whether the results are measured, simulated or calculated.
        axes: the sliders.
        stack: what the columns show.
        at: is called with one value of each axis, for all combinations. Returns the result, or a sentence
            that says why there is none.
        scalars: by name, the units of more numbers of each result, which are written below the figure.
        over: name of the axis whose values stand side by side; by default, the first.
        digits: significant digits that are stored of each number. Fewer make the page smaller.

    Returns:
        What a notebook shows as sliders and a figure.

    Raises:
        ValueError: the grid is too large, or a result does not have the announced numbers.

    Example::

        explore(
            "calculated: bytes at rest",
            [Axis("ranks", [1, 2, 4, 8])],
            Stack("held by a rank", "GiB", {"shards": "#0072B2"}, upto=16),
            lambda ranks: Point([16 / ranks]),
        )
    """
    scalars = dict(scalars or {})
    count = prod(len(axis.values) for axis in axes)
    if not 0 < count <= MOST_POINTS:
        raise ValueError(f"explore: expected 1 to {MOST_POINTS} combinations of values, found {count}")
    names = [axis.name for axis in axes]
    if over is not None and over not in names:
        raise ValueError(f"explore: expected over to be one of {', '.join(names)}, found {over!r}")
    columns: list[list[float | None]] = [[] for _ in range(len(stack.parts) + len(scalars))]
    notes: list[str] = []
    note: list[int] = []
    for values in product(*(axis.values for axis in axes)):
        point = at(*values)
        said = point if isinstance(point, str) else point.note
        if isinstance(point, str):
            numbers: list[float | None] = [None] * len(columns)
        else:
            numbers = [_rounded(number, digits) for number in (*point.parts, *point.scalars)]
        if len(numbers) != len(columns):
            raise ValueError(f"explore: expected {len(columns)} numbers at {values}, found {len(numbers)}")
        for column, number in zip(columns, numbers, strict=True):
            column.append(number)
        if said not in notes:
            notes.append(said)
        note.append(notes.index(said))
    data: dict[str, Any] = {
        "title": title,
        "axes": [{**axis._asdict(), "values": [_written(value) for value in axis.values]} for axis in axes],
        "over": 0 if over is None else names.index(over),
        "stack": {**stack._asdict(), "parts": list(stack.parts), "colors": list(stack.parts.values())},
        "ticks": _ticks(stack.upto),
        "scalars": [list(pair) for pair in scalars.items()],
        "columns": columns,
        "notes": notes,
        "note": note,
    }
    data["id"] = "s" + hashlib.sha256(json.dumps(data).encode()).hexdigest()[:12]
    return Sliders(data, _text(data), _picture(data))


def _rounded(number: float, digits: int = 4) -> float | int:
    rounded = float(f"{number:.{digits}g}") if abs(number) > 1e-12 else 0.0  # less is an error of rounding
    return int(rounded) if rounded.is_integer() else rounded


def _written(value: str | int | float) -> str:
    return value if isinstance(value, str) else f"{value:,}"


def _short(number: float) -> str:
    return f"{float(f'{number:.3g}'):,.10g}"


def _ticks(upto: float) -> list[float]:
    ticks = MaxNLocator(5, steps=[1, 2, 5, 10]).tick_values(0, upto)
    return [_rounded(tick) for tick in ticks if tick <= upto]


def _index(data: dict[str, Any], places: Sequence[int]) -> int:
    index = 0
    for axis, place in zip(data["axes"], places, strict=True):
        index = index * len(axis["values"]) + place
    return index


def _text(data: dict[str, Any]) -> str:
    """What the sliders can be set to, and the numbers at the start."""
    lines = [data["title"]]
    for axis in data["axes"]:
        unit = f" {axis['unit']}" if axis["unit"] else ""
        lines.append(f"  {axis['name']}: {' | '.join(axis['values'])}{unit}")
    start = [axis["start"] for axis in data["axes"]]
    index, stack = _index(data, start), data["stack"]
    lines.append("at " + ", ".join(axis["values"][axis["start"]] for axis in data["axes"]))
    units = [stack["unit"]] * len(stack["parts"]) + [unit for _, unit in data["scalars"]]
    names = [*stack["parts"], *(name for name, _ in data["scalars"])]
    for name, unit, column in zip(names, units, data["columns"], strict=True):
        number = column[index]
        lines.append(f"  {name}: " + ("none" if number is None else f"{_short(number)} {unit}"))
    lines.append(f"  {data['notes'][data['note'][index]]}")
    return "\n".join(line.rstrip() for line in lines if line.strip())


def _picture(data: dict[str, Any]) -> bytes:
    stack, over = data["stack"], data["axes"][data["over"]]
    figure, (axes,) = plots.figure(width=9.6, height=3.2)
    labelled = False
    for place in range(len(over["values"])):
        places = [axis["start"] for axis in data["axes"]]
        places[data["over"]] = place
        index = _index(data, places)
        parts = [column[index] for column in data["columns"][: len(stack["parts"])]]
        if None in parts:
            axes.text(place, 0, "none", ha="center", va="bottom", fontsize=8)
            continue
        bottom = 0.0
        for name, color, part in zip(stack["parts"], stack["colors"], parts, strict=True):
            axes.bar(place, part, bottom=bottom, width=0.6, color=color, label=None if labelled else name)
            bottom += part
        labelled = True
        cut = bottom > stack["upto"]
        text = f"{'▲ ' if cut else ''}{_short(bottom)}"
        axes.text(place, min(bottom, stack["upto"] * 0.94), text, ha="center", va="bottom", fontsize=8)
    if stack["limit"] is not None:
        axes.axhline(stack["limit"], color=LIMIT_COLOR, lw=1.2, ls="--", label=stack["limit_name"])
    start = ", ".join(
        f"{axis['name']} {axis['values'][axis['start']]}" for axis in data["axes"] if axis is not over
    )
    axes.set(xticks=range(len(over["values"])), xticklabels=over["values"], ylim=(0, stack["upto"]))
    axes.set(
        xlabel=" ".join([over["name"], over["unit"]]).strip(), ylabel=f"{stack['name']}, {stack['unit']}"
    )
    axes.set_title(data["title"] + (f"\n{start}" if start else ""))
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(handles[::-1], labels[::-1], loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize="small")
    picture = plots.show(figure, alt=data["title"]).data
    assert isinstance(picture, bytes)
    return picture
