"""What a reader wrote is held against a target, on every rank; tables read the same on a page and as text."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fsdp_utils.lessons import turns
from fsdp_utils.lessons.tables import Table
from fsdp_utils.lessons.turns import Answer, Verdict, answers, at_most, exactly, run_answer, try_answers, turn

GOALS = {
    "gathers": exactly(8, otherwise="Gather each unit twice."),
    "peak": at_most(130, otherwise="Free each unit after use."),
}

LESSON = """\
# %% tags=["exercise"]
def mine():
    return None

# %% tags=["solution"] turn=1
result = {"gathers": 8, "peak": 129.5}

# %% tags=["wrong"] turn=1
result = {"gathers": 4, "peak": 129.5}

# %% tags=["wrong"] turn=1 raises="no such unit"
# %%timeit
raise KeyError("no such unit")
"""


def test_a_table_aligns_numbers_right_and_escapes_html() -> None:
    table = Table(["way", "KiB"], [["<one>", 12345], ["two", 1.5]], note="Of all.")
    assert repr(table) == "way       KiB\n<one>  12,345\ntwo       1.5\nOf all."
    html = table._repr_html_()
    assert "&lt;one&gt;" in html
    assert '<td style="text-align: right">12,345</td>' in html
    assert html.endswith("<p>Of all.</p>")


def test_a_row_of_another_length_than_the_head_is_refused() -> None:
    with pytest.raises(ValueError, match="expected 2 values in each row, as in the head, found 1"):
        Table(["way", "KiB"], [["one"]])


def test_a_target_is_met_where_every_rank_meets_it() -> None:
    assert Verdict([{"gathers": 8, "peak": 130}, {"gathers": 8.0, "peak": 1}], GOALS).solved


def test_the_first_rank_that_misses_is_shown_with_the_sentence_that_helps() -> None:
    verdict = Verdict([{"gathers": 8, "peak": 130}, {"gathers": 4, "peak": 130}], GOALS)
    assert not verdict.solved
    assert verdict.advice == ["Gather each unit twice."]
    assert verdict.rows[0] == ["gathers", "4", "8", "✗"]
    assert verdict.rows[1][-1] == "✓"


@pytest.mark.parametrize("result", [{}, {"gathers": None, "peak": 1}])
def test_a_value_that_is_missing_misses_its_target(result: dict) -> None:
    assert not Verdict([result], GOALS).solved


def test_what_could_not_be_measured_is_one_sentence() -> None:
    verdict = Verdict([{"problem": "A rank waits."}, {"problem": "A rank waits."}], GOALS)
    assert not verdict.solved
    assert verdict.advice == ["A rank waits."]
    assert verdict.rows[0] == ["gathers", "·", "8", "·"]


def test_nothing_written_is_not_yet() -> None:
    verdict = turn(1, [None, None], GOALS)
    assert not verdict.solved
    assert verdict.advice == []
    assert "Not yet: there is nothing to measure." in repr(verdict)
    assert "nothing to measure on rank 1" in repr(turn(1, [{"gathers": 8, "peak": 1}, None], GOALS))


def test_answers_are_found_with_their_kind_turn_code_and_error() -> None:
    assert answers(LESSON) == [
        Answer("solution", 1, 'result = {"gathers": 8, "peak": 129.5}', None),
        Answer("wrong", 1, 'result = {"gathers": 4, "peak": 129.5}', None),
        Answer("wrong", 1, '%%timeit\nraise KeyError("no such unit")', "no such unit"),
    ]


def test_an_answer_runs_in_a_copy_of_the_namespace() -> None:
    namespace = {"width": 4, "result": "the reader's"}
    assert run_answer("width += 1\nresult = width", namespace) == 5
    assert namespace == {"width": 4, "result": "the reader's"}


@pytest.mark.parametrize(
    ("source", "told"),
    [
        (LESSON, None),
        (LESSON.replace('"gathers": 8', '"gathers": 9'), "The solution of turn 1 misses its target"),
        (LESSON.replace('"gathers": 4', '"gathers": 8'), "A wrong answer to turn 1 meets its target"),
        (LESSON.replace('raises="no such unit"', 'raises="another"'), "no such unit"),
        (LESSON.replace(' raises="no such unit"', ""), "no such unit"),
    ],
)
def test_solutions_have_to_pass_and_wrong_answers_to_fail(
    source: str,
    told: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "07_a_lesson.py").write_text(source.replace("# %%timeit\n", ""))
    monkeypatch.setattr(turns, "_goals", {1: GOALS})
    if told is None:
        try_answers(7, folder=tmp_path)
        assert (
            capsys.readouterr().out
            == "Checked: 1 solutions meet their targets, 2 wrong answers are refused.\n"
        )
    else:
        with pytest.raises((AssertionError, KeyError), match=told):
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
