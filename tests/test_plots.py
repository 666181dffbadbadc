"""Figures are small PNGs that depend on their data alone."""

import io

import matplotlib as mpl
import pytest
from PIL import Image

from fsdp_utils.lessons import plots

SHARDS = {"weight": [2, 2], "bias": [1, 1]}
# each takes a number that it draws
FIGURES = {
    "shards": lambda n: plots.shards({"flat": {"weight": [n, 3], "bias": [0, 2]}, "by row": SHARDS}),
    "units": lambda n: plots.units({"one": [9], "blocks": [n, 4, 4]}),
    "memory_per_rank": lambda n: plots.memory_per_rank({"whole": {"a": 8, "b": n}}, unit="KiB"),
    "alive": lambda n: plots.alive({"one": [0, 100, 0], "many": [0, 20, 30 + n, 0]}, whole_model=100),
    "losses": lambda n: plots.losses({"one process": [3, 2, n], "by hand": [3, 2, n]}),
    "layers": lambda n: plots.layers(
        {"one": {"a": "x", "b": str(n)}, "two": {"a": "y", "b": "z"}}, above=["all"], below=["torch"], alt="a"
    ),
    "amounts": lambda n: plots.amounts(
        {"p": {"one": {"a": 8, "b": n}, "two": {"a": 1}}}, unit="KiB", alt="a"
    ),
    "life_of_a_unit": lambda n: plots.life_of_a_unit(n + 2),
}


@pytest.mark.parametrize("name", FIGURES)
def test_a_figure_is_small_repeats_itself_and_shows_its_data(name):
    first, again, other = FIGURES[name](1), FIGURES[name](1), FIGURES[name](2)
    assert first.data == again.data
    assert first.data != other.data
    assert len(first.data) < 40_000
    picture = Image.open(io.BytesIO(first.data))
    assert picture.info.keys() <= {"transparency"}  # no version of matplotlib, no date
    assert first.metadata["alt"]


@pytest.mark.parametrize("name", FIGURES)
def test_the_look_does_not_depend_on_the_readers_settings(name):
    usual = FIGURES[name](1).data
    with mpl.rc_context({"axes.facecolor": "black", "text.color": "white", "font.size": 20}):
        assert FIGURES[name](1).data == usual


@pytest.mark.parametrize("name", FIGURES)
def test_a_figure_has_a_light_background_of_its_own(name):
    picture = Image.open(io.BytesIO(FIGURES[name](1).data)).convert("RGBA")
    assert picture.getpixel((0, 0)) == (251, 251, 248, 255)
