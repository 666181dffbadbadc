"""The step player: its data held against schedules worked out by hand, and its script in Chromium."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from fsdp_utils.collectives import play
from tests.chromium import seen_in
from tests.test_collectives_replay import NONE, PRE, backward


def replayed(order: str):
    return backward(order).replay(compute_s=1.0, link_gib_s=1.0)


def data_of(player) -> dict:
    html = player._repr_mimebundle_()["text/html"]
    (text,) = re.findall(r"\}\)\((\{.*\})\);</script>", html)
    return json.loads(text)


def held(run, line: str, moment: float) -> float:
    """The part of unit b that a rank holds at a moment, on the line that the player draws."""
    corners = data_of(play({"": run}))["runs"][0]["held"]["b"][line]
    begin, before = [corner for corner in corners if corner[0] <= moment][-1]
    end, after = next((corner for corner in corners if corner[0] > moment), (moment + 1, before))
    return before + (after - before) * (moment - begin) / (end - begin)


def test_what_a_rank_holds_of_a_unit():
    run = replayed(NONE)
    seen = [held(run, "parameters", moment) for moment in (0.0, 0.25, 1.0, 2.6, 6.0)]
    assert seen == pytest.approx([0.5, 0.75, 1.0, 0.5, 0.5])
    assert held(run, "gradients", 6.0) == 0.5
    early = replayed("Ab mb Ab fb mb fb Rb")
    assert held(early, "parameters", 0.75) == 1.0  # in use while it is gathered once more


def test_the_player_has_the_times_and_the_memory_of_the_replay():
    data = data_of(play({"one": replayed(NONE), "two": replayed(PRE)}))
    assert (data["until"], data["time_unit"]) == (6.0, "s")
    one, two = data["runs"]
    assert [run["title"] for run in (one, two)] == ["one", "two"]
    named = [(span["kind"], span["unit"], span["start"], span["end"]) for span in one["spans"]]
    assert named[:3] == [
        ("all_gather", "b", 0, 0.5),
        ("compute", "b", 0.5, 2.5),
        ("reduce_scatter", "b", 2.5, 3),
    ]
    assert {span["lane"] for span in one["spans"]} == {0, 1}
    points = one["held"]["b"]["parameters"]
    assert points[0] == [0, 0.5]
    assert [0.5, 1.0] in points  # gathered
    assert [2.5, 1.0] in points  # just before it is freed
    assert [2.5, 0.5] in points  # and then


def test_no_name_leaves_the_script_and_nothing_to_play_is_said():
    trace = backward(NONE)
    trace.events = [replace(event, module="</script><b>" + event.module) for event in trace.events]
    run = trace.replay(compute_s=1.0, link_gib_s=1.0)
    html = play({"<i>a</i> replay": run})._repr_mimebundle_()["text/html"]
    assert html.count("</script>") == 1
    assert "<i>" not in html.split("<script>")[0]
    with pytest.raises(
        ValueError, match="expected replays in which something takes time, found \\['empty'\\]"
    ):
        play({"empty": backward("fb").replay(link_gib_s=1.0)})


ACTIONS = """
<script>
const [root, twice] = document.querySelectorAll("[data-player]"), seen = [];
const told = () => root.querySelector(".told").textContent;
const [back, playing, on] = root.querySelectorAll("button");
const head = () => Number(root.querySelector(".head").getAttribute("x1"));
seen.push(root.querySelectorAll("rect.span").length, told());
on.click(); seen.push(told());
on.click(); seen.push(told());
back.click(); seen.push(told());
const scrub = root.querySelector("input");
scrub.value = 1000; scrub.dispatchEvent(new Event("input")); seen.push(told());
root.querySelector("rect.span").dispatchEvent(new Event("mouseenter")); seen.push(told());
seen.push(twice.dataset.ready, document.querySelectorAll("img").length);
const widths = [...root.querySelectorAll("rect.span")].map((bar) => Number(bar.getAttribute("width")));
seen.push(Math.min(...widths) >= 2);
const chosen = document.querySelectorAll("[data-player]")[2];
const [first, second] = chosen.querySelectorAll("[role=group] button");
const look = () => seen.push(
  chosen.querySelectorAll("rect.span").length, chosen.querySelector("svg text").textContent,
  first.getAttribute("aria-pressed"), second.getAttribute("aria-pressed"));
look(); second.click(); look();
const before = head();
playing.click();  // from the end: it begins anew
setTimeout(() => {
  seen.push(head() < before, playing.textContent);
  const node = Object.assign(document.createElement("pre"), {id: "seen", textContent: JSON.stringify(seen)});
  document.body.append(node);
}, 1500);
</script>
"""


def test_the_player_in_a_browser(tmp_path: Path):
    run = replayed(NONE)
    thin = max(run.spans, key=lambda span: span.end)  # a thousandth of the step has 2 pixels
    short = replace(thin, start=thin.end - 0.006)
    run = replace(run, spans=[short if span is thin else span for span in run.spans])
    html = play({"one": run})._repr_mimebundle_()["text/html"]
    of_two = play({"one": replayed(NONE), "two": replayed("Ab mb fb Rb")}, choose=True)
    html = html + html + of_two._repr_mimebundle_()["text/html"]  # twice, as JupyterLab does in a second view
    assert seen_in(html + ACTIONS, tmp_path) == [
        6,
        "0.00 s | all-gather b",
        "0.50 s | compute b",
        "2.50 s | reduce-scatter b",
        "0.50 s | compute b",
        "6.00 s | nothing",
        "all-gather b · backward · 1.0 GiB · 0.00 s to 0.50 s",
        "yes",
        0,
        True,
        *(6, "one", "true", "false"),
        *(3, "two", "false", "true"),
        True,
        "❚❚",
    ]
