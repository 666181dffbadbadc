"""What a reader wrote is held against a target, on every rank; tables read the same on a page and as text."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fsdp_utils.lessons import turns
from fsdp_utils.lessons.tables import Table
from fsdp_utils.lessons.turns import (
    Answer,
    Verdict,
    answers,
    at_most,
    exactly,
    run_answer,
    run_solution,
    try_answers,
    turn,
    yours,
)
from tests.notebook_kernel import Notebook

GOALS = {
    "gathers": exactly(8, otherwise="Gather each unit twice."),
    "peak": at_most(130, otherwise="Free each unit after use."),
}
SCORE = "def score(mine):\n    found = mine()\n    return found and {'gathers': found, 'peak': 129.5}"

LESSON = """\
# %% tags=["exercise"]
def mine():
    return None

# %% tags=["solution"] turn=1
def mine():
    return 8

# %% tags=["wrong"] turn=1
def mine():
    return 4

# %% tags=["wrong"] turn=1 raises="no such unit"
# %%timeit
def mine():
    raise KeyError("no such unit")
"""


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The namespace of a notebook, with a scoring function."""
    namespace: dict[str, Any] = {}
    exec(SCORE, namespace)
    monkeypatch.setattr(turns, "get_ipython", lambda: SimpleNamespace(user_ns=namespace))
    return namespace


def test_a_table_aligns_numbers_right_and_escapes_html() -> None:
    table = Table(["way", "KiB"], [["<one>", 12345], ["two", 1.5]], note="Of all.")
    assert repr(table) == "way       KiB\n<one>  12,345\ntwo       1.5\nOf all."
    html = table._repr_html_()
    assert "&lt;one&gt;" in html
    assert '<td style="text-align: right">12,345</td>' in html
    assert html.endswith("<p>Of all.</p>")
    with pytest.raises(ValueError, match="expected 2 values in each row, as in the head, found 1"):
        Table(["way", "KiB"], [["one"]])


def test_a_target_is_met_where_every_rank_meets_it_and_the_first_that_misses_is_shown() -> None:
    assert Verdict([{"gathers": 8, "peak": 130}, {"gathers": 8.0, "peak": 1}], GOALS).solved
    verdict = Verdict([{"gathers": 8, "peak": 130}, {"gathers": 4, "peak": 130}], GOALS)
    assert not verdict.solved
    assert verdict.advice == ["Gather each unit twice."]
    assert verdict.rows[0] == ["gathers", "4", "8", "✗"]
    assert verdict.rows[1][-1] == "✓"


@pytest.mark.parametrize(
    ("result", "note"),
    [
        ({}, "Not measured: gathers; peak."),
        ({"gathers": None, "peak": 1}, "Not measured: gathers."),
        ({"gathers": 8, "peak": 200}, "Free each unit after use."),
        ({"peak": 200}, "Free each unit after use."),
    ],
)
def test_a_sentence_stands_only_beside_a_row_that_was_measured(result: dict, note: str) -> None:
    verdict = Verdict([result], GOALS)
    assert not verdict.solved
    assert verdict.note == note
    assert (verdict.rows[0][-1] == "·") == (result.get("gathers") is None)


@pytest.mark.parametrize(
    ("results", "note"),
    [
        ([{"problem": "A rank waits."}] * 2, "A rank waits."),
        ([None, None], "Not yet: there is nothing to measure."),
        ([{"gathers": 8, "peak": 1}, None], "Not yet: nothing to measure on rank 1."),
    ],
)
def test_what_could_not_be_measured_is_one_sentence(results: list[Any], note: str) -> None:
    verdict = Verdict(results, GOALS)
    assert not verdict.solved
    assert verdict.note == note
    assert verdict.rows[0] == ["gathers", "·", "8", "·"]


def test_answers_are_found_with_their_kind_turn_code_and_error() -> None:
    assert answers(LESSON) == [
        Answer("solution", 1, "def mine():\n    return 8", None),
        Answer("wrong", 1, "def mine():\n    return 4", None),
        Answer("wrong", 1, '%%timeit\ndef mine():\n    raise KeyError("no such unit")', "no such unit"),
    ]


def test_an_answer_runs_in_a_copy_of_the_namespace(here: dict[str, Any]) -> None:
    here.update(width=4, mine="the reader's")
    before = dict(here)
    code = "width += 4\ndef mine():\n    return width"
    assert run_answer(code, "score(mine)", here) == {"gathers": 8, "peak": 129.5}
    assert here == before


STUB = "def mine(x=1):\n    return None  # your lines here"
RIGHT = "def mine():\n    return 8"
NOT_RIGHT = {  # the cell that the reader runs after a right answer, and what the turn says then
    STUB: "Not yet: there is nothing to measure.",
    "class mine:\n    def __init__(self): self.x = 8\n    def __call__(self): pass": "Not yet",
    "": "There is no `mine`: run the cells of this turn from the first one.",
    "def mine(:": "There is no `mine`",
    "def mine():\n    x = 8": "`mine` returned None: is a `return` missing?",
    "def mine():\n    return 4": "Gather each unit twice.",
    "def mine():\n    return eight": "raised NameError: name 'eight' is not defined",
}


@pytest.mark.parametrize(("code", "told"), NOT_RIGHT.items())
def test_an_answer_is_measured_once_and_what_went_wrong_is_a_sentence(
    code: str, told: str, here: dict[str, Any]
) -> None:
    exec(RIGHT, here)
    assert turn(1, "score(mine)", GOALS, on_ranks=False).solved
    assert yours(1, "gathers") == [8]
    try:
        exec(code, here)
    except SyntaxError:
        assert code == "def mine(:"
    verdict = turn(1, "score(mine)", GOALS, on_ranks=False)
    assert not verdict.solved
    assert told in verdict.note
    assert yours(1, "gathers") == ([4] if "4" in code else [])


def test_of_two_parts_of_an_answer_the_empty_one_is_named(here: dict[str, Any]) -> None:
    exec(STUB + "\ndef other():\n    return 1\ndef both(mine, other):\n    return {}", here)
    assert turn(1, "both(mine, other)", GOALS, on_ranks=False).note == "`mine` is still empty."
    exec(RIGHT, here)  # the next cell raises after the first part: the other one was of an answer before
    assert "There is no `other`" in turn(1, "both(mine, other)", GOALS, on_ranks=False).note
    del here["both"]  # as after a restart
    assert "the first cell of the lesson" in turn(1, "both(mine, other)", GOALS, on_ranks=False).note


def test_answers_on_the_ranks_are_forgotten_too() -> None:
    on_rank_0 = "import torch.distributed as dist\nif dist.get_rank() == 0:\n    def mine(): return 8"
    score = SCORE.replace("    found", "    import torch.distributed as dist; dist.barrier()\n    found", 1)
    notebook = Notebook()
    try:
        start = "import fsdp_utils.lessons.turns as t; from fsdp_utils.notebook import ranks; ranks.start(2)"
        assert not notebook.run(start).error
        notebook.run(f"%%ranks\n{score}")
        goals = "{'gathers': t.exactly(8, otherwise='Gather each unit twice.')}"
        for code, told in {on_rank_0: "There is no `mine`", **NOT_RIGHT}.items():
            for cell, note in ((RIGHT, "Right: every rank meets the target."), (code, told)):
                notebook.run(f"%%ranks\n{cell}" if cell else "")
                said = notebook.run(f"t.turn(1, 'score(mine)', {goals})")
                assert note in said.value, (cell, said)
                assert said.seconds < 10  # no rank waits for one that has no answer
        assert "all ranks raised NameError: name 'eight' is not defined (line 2: return eight)" in said.value
        assert "---->   2     return eight" in said.text
        notebook.run("%%ranks\n" + on_rank_0)
        notebook.run(f"t.turn(1, 'score(mine)', {goals})")
        notebook.run("%%ranks\n" + on_rank_0.replace("== 0", "== 1"))
        assert "There is no `mine`" in notebook.run(f"t.turn(1, 'score(mine)', {goals})").value
        forever = "def mine():\n    while dist.get_rank(): pass\n    return dist.barrier()"
        notebook.run(f"%%ranks\n{forever}")
        said = notebook.run(f"t.turn(1, 'score(mine)', {goals})")
        assert "Meanwhile rank 1 stood at line 2: while dist.get_rank(): pass." in said.value, said
        assert said.seconds < 25  # after the 10 seconds of a turn, and not 60
    finally:
        notebook.close()


@pytest.mark.parametrize(
    ("source", "told"),
    [
        (LESSON, None),
        (LESSON.replace("return 8", "return 9"), "The solution of turn 1 misses its target"),
        (LESSON.replace("return 4", "return 8"), "A wrong answer to turn 1 meets its target"),
        (LESSON.replace('raises="no such unit"', 'raises="another"'), "expected 'another' in the verdict"),
        (LESSON.replace("def mine():\n    return 4", "x = 4"), "expected an answer that defines .'mine'."),
    ],
)
def test_solutions_have_to_pass_and_wrong_answers_to_fail(
    source: str,
    told: str | None,
    tmp_path: Path,
    here: dict[str, Any],
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "07_a_lesson.py").write_text(source.replace("# %%timeit\n", ""))
    exec(STUB, here)
    turn(1, "score(mine)", GOALS, on_ranks=False)
    if told is None:
        try_answers(7, folder=tmp_path)
        assert (
            capsys.readouterr().out
            == "Checked: 1 solutions meet their targets, 2 wrong answers are refused.\n"
        )
        assert run_solution(7, 1, folder=tmp_path) == [{"gathers": 8, "peak": 129.5}]
    else:
        with pytest.raises(AssertionError, match=told):
            try_answers(7, folder=tmp_path)


def test_the_lessons_are_found_where_the_library_is_installed_without_them(tmp_path):
    """As in Colab: a copy of the library, and a notebook that runs in a clone's folder notebooks."""
    shutil.copytree(Path(turns.__file__).parents[1], tmp_path / "installed" / "fsdp_utils")
    home = tmp_path / "notebooks"
    home.mkdir()
    script = (
        "import fsdp_utils; print(fsdp_utils.__file__)\n"
        "from fsdp_utils.lessons import lesson, turns\n"
        "print(lesson.NOTEBOOKS)\n"
        "turns.run_solution(3, 1)"
    )
    said = subprocess.run(
        [sys.executable, "-c", script],
        cwd=home,
        env={**os.environ, "PYTHONPATH": str(tmp_path / "installed")},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert said.stdout.splitlines() == [str(tmp_path / "installed/fsdp_utils/__init__.py"), str(home)]
    assert f"expected the source of lesson 3 in {home / 'src'}, found none" in said.stderr
