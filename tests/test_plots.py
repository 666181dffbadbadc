"""Figures are small PNGs that depend on their data alone."""

import io
from collections.abc import Callable
from typing import Any

import matplotlib as mpl
import pytest
from PIL import Image

from fsdp_utils.lessons import plots

RUN = {"ranks": 2, "begun": 0, "points": [(2, 0), (5, 17)], "ended": 5, "killed": 1}
# each takes a number that it draws
FIGURES: dict[str, Callable[[int], Any]] = {
    "alive": lambda n: plots.alive({"one": [0, 100, 0], "many": [0, 20, 30 + n, 0]}, whole_model=100),
    "alive, with a line after forward": lambda n: plots.alive(
        {"one": [0, 100, 0]}, whole_model=100, forward=[n]
    ),
    "layers": lambda n: plots.layers(
        {"one": {"a": "x", "b": str(n)}, "two": {"a": "y", "b": "z"}}, above=["all"], below=["torch"], alt="a"
    ),
    "amounts": lambda n: plots.amounts({"p": {"one": {"a": 8, "b": n}, "two": {"a": 1}}}, unit="KiB"),
    "resharding": lambda n: plots.resharding(60, saved_by=4, wanted_by=n + 1),
    "calls": lambda n: plots.calls({"p": [["a", "b"], ["a", str(n)], ["a", "b"]]}, first=[n], alt="a"),
    "life_of_a_unit": lambda n: plots.life_of_a_unit(n + 2),
    "life_of_a_run": lambda n: plots.life_of_a_run(
        [RUN, {**RUN, "points": [(7 + n, 10), (15, 40)]}], every=10, unit="s", alt="a"
    ),
}


@pytest.mark.parametrize("name", FIGURES)
def test_a_figure_is_small_repeats_itself_and_shows_its_data_on_a_light_background(name: str) -> None:
    first, other = FIGURES[name](1), FIGURES[name](2)
    with mpl.rc_context({"axes.facecolor": "black", "text.color": "white", "font.size": 20}):
        again = FIGURES[name](1)  # the reader's settings make no difference
    assert first.data == again.data
    assert first.data != other.data
    assert len(first.data) < 40_000
    picture = Image.open(io.BytesIO(first.data))
    assert picture.info.keys() <= {"transparency"}  # no version of matplotlib, no date
    assert picture.convert("RGBA").getpixel((0, 0)) == (251, 251, 248, 255)
    assert first.metadata["alt"]
