"""Sliders: what they store held against what was given, and their script in Chromium."""

import json
import re
from pathlib import Path

import pytest

from fsdp_utils.lessons.sliders import Axis, Point, Sliders, Stack, explore
from tests.chromium import seen_in

ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / "fsdp_utils/lessons/sliders.js"


def example(title: str = "calculated") -> Sliders:
    """Two axes: parts n and 10 m, the number n m; nothing for n = 3 and m = 2."""

    def at(n: int, m: int) -> Point | str:
        if (n, m) == (3, 2):
            return "three does not go with two"
        return Point([n, 10 * m], [n * m], "measured" if m == 1 else "calculated")

    return explore(
        title,
        [Axis("ranks", [1, 2, 3]), Axis("batch", [1, 2], "samples", start=1)],
        Stack("memory", "GiB", {"shards": "#0072B2", "activations": "#009E73"}, 20, 15, "limit"),
        at,
        scalars={"product": "s"},
        over="ranks",
    )


def test_the_grid_lies_in_rows_with_the_last_axis_fastest():
    data = example().data
    assert data["columns"] == [[1, 1, 2, 2, 3, None], [10, 20, 10, 20, 10, None], [1, 2, 2, 4, 3, None]]
    notes = [data["notes"][i] for i in data["note"]]
    assert notes[:2] == notes[2:4] == ["measured", "calculated"]
    assert notes[4:] == ["measured", "three does not go with two"]


def test_the_output_repeats_itself_is_small_and_no_title_leaves_its_script():
    first, second = (example("</script><b>bold</b>")._repr_mimebundle_() for _ in range(2))
    assert first == second
    assert first["text/html"].count("</script>") == 1
    assert "<b>" not in first["text/html"].split("<script>")[0]
    assert SCRIPT.stat().st_size < 12 * 1024
    assert not re.search(r"https?://(?!www\.w3\.org)|fetch\(|import\(|XMLHttp", SCRIPT.read_text())


ACTIONS = """
<script>
const [root, twice] = document.querySelectorAll("[data-sliders]"), seen = [];
const told = () => root.querySelector(".told").textContent;
const [ranks, batch] = root.querySelectorAll("input");
const bars = () => [...root.querySelectorAll("rect.part")];
const heights = () => bars().map((bar) => Math.round(bar.getAttribute("height")));
const slide = (input, place) => { input.value = place; input.dispatchEvent(new Event("input")); };
const ticks = () => [...root.querySelectorAll("svg line")].map((line) => line.getAttribute("y1")).join();
const before = heights().join(), axis = ticks();
seen.push(told(), root.querySelector(".note").textContent);
slide(batch, 0);
seen.push(told(), heights().join() !== before, ticks() === axis, batch.getAttribute("aria-valuetext"));
seen.push(root.querySelector(".note").textContent);
slide(ranks, 2); seen.push(told());
slide(batch, 1); seen.push(told(), root.querySelector(".note").textContent);
root.querySelectorAll("g.column")[1].dispatchEvent(new Event("click"));
seen.push(told(), ranks.value, [...root.querySelectorAll(".total")].map((label) => label.textContent));
seen.push(twice.dataset.ready, document.querySelectorAll("img").length);
batch.focus(); seen.push(document.activeElement === batch);
const node = Object.assign(document.createElement("pre"), {id: "seen", textContent: JSON.stringify(seen)});
document.body.append(node);
</script>
"""


EVERY_SLIDER = """
<script>
const root = document.querySelector("[data-sliders]"), seen = [], limits = [];
const figure = () => root.querySelector("svg").outerHTML;
const axis = () => [...root.querySelectorAll("svg > line")].map((line) => line.getAttribute("y1")).join();
for (const input of root.querySelectorAll("input")) {
  const before = figure(), own = input.value, ticks = axis();
  let moved = false;
  for (let place = 0; place <= Number(input.max); place++) {
    input.value = place;
    input.dispatchEvent(new Event("input"));
    moved ||= figure() !== before;
    limits.push(axis() === ticks && !/NaN|undefined/.test(root.outerHTML));
  }
  seen.push(moved);
  input.value = own;
  input.dispatchEvent(new Event("input"));
}
const text = JSON.stringify([seen, limits.every(Boolean)]);
document.body.append(Object.assign(document.createElement("pre"), {id: "seen", textContent: text}));
</script>
"""


@pytest.mark.parametrize(("lesson", "sliders"), [("06", 4), ("14", 7)])
def test_every_slider_of_a_lesson_changes_its_figure(lesson: str, sliders: int, tmp_path: Path):
    (path,) = (ROOT / "notebooks").glob(f"{lesson}_*.ipynb")
    outputs = [
        "".join(output["data"]["text/html"])
        for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]
        for output in cell.get("outputs", [])
        if "data-sliders" in "".join(output.get("data", {}).get("text/html", ""))
    ]
    assert len(outputs) == 1
    assert len(outputs[0]) < 260 * 1024
    assert seen_in(outputs[0] + EVERY_SLIDER, tmp_path) == [[True] * sliders, True]


def test_sliding_draws_the_figure_anew_on_the_same_axis(tmp_path: Path):
    html = example()._repr_mimebundle_()["text/html"]
    # twice, as JupyterLab shows an output in a second view
    assert seen_in(html + html + ACTIONS, tmp_path) == [
        "21 GiB of 15 GiB · product: 2 s",
        "calculated",
        "11 GiB of 15 GiB · product: 1 s",
        True,
        True,
        "1 samples",
        "measured",
        "13 GiB of 15 GiB · product: 3 s",
        "no result",
        "three does not go with two",
        "22 GiB of 15 GiB · product: 4 s",
        "1",
        ["▲ 21", "▲ 22", "none"],
        "yes",
        0,
        True,
    ]
