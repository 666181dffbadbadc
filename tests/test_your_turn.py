"""`%%turn` runs a reader's answer from a clean start and names what went wrong."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from fsdp_utils.lessons import lesson, progress, your_turn
from fsdp_utils.lessons.your_turn import Goal, Measured, Verdict, at_most, exactly
from tests.notebook_kernel import Notebook

SET_UP = """%%ranks
import torch, torch.distributed as dist
from fsdp_utils.lessons.your_turn import NotYet, exactly, turn

rank, world = dist.get_rank(), dist.get_world_size()

@turn(1, {"the sum": exactly(2, less="Too few ranks add.", more="Too much.")})
def score(add):
    if not callable(add):
        raise NotYet("`add` should be a function.")
    return {"the sum": add(torch.ones(1))}
"""
RIGHT = "def add(x):\n    dist.all_reduce(x)\n    return x"
NOT_RIGHT = {  # the cell of a reader -> words of the verdict
    "def add(x):\n    return None  # your lines": "Not yet: fill in the cell and run it again.",
    "def plus(x):\n    return x": "does not define `add`",
    "def add(x:": "raised SyntaxError",
    "def add(x):\n    dist.all_reduce(x)": "`add` returned None: is a `return` missing?",
    "def add(x):\n    dist.all_reduce(x)\n    if rank == 0:\n        return x": (
        "Rank 1: `add` returned None: is a `return` missing?"
    ),
    "def add(x):\n    return x": "Too few ranks add.",
    "def add(x):\n    dist.all_reduce(x)\n    return 2 * x": "Too much.",
    "def add(x):\n    return 'two'": "Expected for “the sum”: 2, found a str.",
    "def add(x):\n    return eight": "raised NameError: name 'eight' is not defined (line 2: return eight)",
    "add = 8": "`add` should be a function.",
    "def add(x):\n    if rank == 0: dist.all_reduce(x)\n    return x": (
        "A rank would wait for ever: all_reduce of 4 bytes on rank 0, and no such call on rank 1."
    ),
    "def add(x):\n    try: rank or dist.all_reduce(x)\n    except RuntimeError: pass\n    return x": (
        "A rank would wait for ever: all_reduce of 4 bytes on rank 0, and no such call on rank 1."
    ),
    "def add(x):\n    dist.broadcast(x, 0) if rank else dist.all_reduce(x)\n    return x": (
        "The ranks call different collectives: all_reduce of 4 bytes on rank 0; broadcast of 4 bytes on rank "
    ),
    "def add(x):\n    dist.all_reduce(torch.ones(1 + rank))\n    return x": (
        "all_reduce of 4 bytes on rank 0; all_reduce of 8 bytes on rank 1. Each would wait for the others."
    ),
    "def add(x):\n    if rank: raise ValueError('no such\\nthing')\n    return dist.all_reduce(x)": (
        "rank 1 raised ValueError: no such"
    ),
    "if rank == 0:\n    def add(x):\n        return x": "does not define `add`",
    "def add(x):\n    if rank == 0: dist.recv(x, 1)\n    return x": "rank 0 waits at line 2",
    "def add(x):\n    dist.recv(x, 1 - rank)\n    return x": "rank 0 waits at line 2",
    "def add(x):\n    while rank: pass\n    return dist.all_reduce(x)": "rank 1 stood at line 2",
}
SOON_S = {"dist.recv(x, 1 - rank)": 20, "while rank": 20}


@pytest.fixture(scope="module")
def notebook() -> Iterator[Notebook]:
    notebook = Notebook()
    start = "from fsdp_utils.lessons import lesson; from fsdp_utils.notebook import ranks; ranks.start(2)"
    assert not notebook.run(start).error
    notebook.run(SET_UP)
    yield notebook
    notebook.close()


@pytest.mark.parametrize(("code", "told"), NOT_RIGHT.items())
def test_a_mistake_is_a_sentence(code: str, told: str, notebook: Notebook) -> None:
    said = notebook.run(f"%%turn 1\n{code}")
    assert not said.error
    assert told in said.shown + said.text, said
    assert "Right" not in said.shown
    assert said.seconds < next((s for part, s in SOON_S.items() if part in code), 3)


def test_an_answer_starts_anew_after_all_these_and_leaves_no_names_behind(notebook: Notebook) -> None:
    notebook.run("%%ranks\nkept = 1")
    right = notebook.run(f"%%turn 1\nkept = 2; other = 3\n{RIGHT}")
    assert "Right: every rank meets the target." in right.shown, right
    assert notebook.run("%%ranks\nprint(kept, 'other' in globals(), 'add' in globals())").text == (
        "all ranks | 1 False False\n"
    )
    assert "its set-up has not run" in notebook.run("%%turn 2\nx = 1").error
    assert "expected the number of a turn" in notebook.run("%%turn one\nx = 1").error


def test_a_turn_in_the_notebook_needs_no_ranks(notebook: Notebook) -> None:
    notebook.run(
        "from fsdp_utils.lessons.your_turn import Picture, exactly, turn\n"
        "drawn = Picture('alive', [{'yours': [0, 1]}], {'whole_model': 1})\n"
        "@turn(3, {'eight': exactly(8, 'Count again.')})\n"
        "def score(mine): return {'eight': mine(), 'picture': drawn}"
    )
    right = notebook.run("%%turn 3\ndef mine(): return 8")
    assert "Right." in right.shown
    assert right.images == 1
    assert "Count again." in notebook.run("%%turn 3\ndef mine(): return 7").shown
    said = notebook.run("%%turn 3\ndef mine():\n    return 1 / 0")
    assert "your code raised ZeroDivisionError: division by zero (line 2: return 1 / 0)" in said.shown


def test_an_answer_never_meets_the_gather_of_its_score(notebook: Notebook) -> None:
    notebook.run(
        "%%ranks\nfrom fsdp_utils.lessons.together import gather_scores\n"
        "@turn(4, {'of both': exactly(1, 'Count again.')})\n"
        "def score(mine): return {'of both': sum(gather_scores(mine()))}"
    )
    assert "Right" in notebook.run("%%turn 4\ndef mine(): return rank").shown
    alone = (
        "%%turn 4\ndef mine():\n    if rank == 0: dist.all_gather_object([None, None], 1)\n    return rank"
    )
    assert "A rank would wait for ever: all_gather of" in notebook.run(alone).shown


def test_advice_stands_only_beside_a_missed_value() -> None:
    for goal, found, mark, advice in (
        (exactly(8, "Count."), 8.0, "✓", ""),
        (exactly(8, less="Few.", more="Many."), 9, "✗", "Many."),
        (exactly(True, "No."), False, "✗", "No."),
        (at_most(130, "Free."), float("nan"), "✗", "Free."),
        (at_most(1, "x"), None, "·", ""),
        (Goal("odd", lambda n: n % 2 == 1, lambda n: f"{n} is even."), 4, "✗", "4 is even."),
    ):
        assert goal.row("n", found)[3:] == (mark, advice)


def test_the_worst_rank_is_shown_each_sentence_once_and_a_missing_value_is_named() -> None:
    goals = {name: exactly(8, "Gather twice.") for name in ("in forward", "in backward")}

    def of_rank(*found: object) -> Measured:
        return Measured([goal.row(name, n) for (name, goal), n in zip(goals.items(), found, strict=True)], "")

    assert Verdict([of_rank(8, 8), of_rank(8, 8.0)]).solved
    verdict = Verdict([of_rank(8, 8), of_rank(4, 4)])
    assert (verdict.solved, verdict.note, verdict.rows[0][1]) == (False, "Gather twice.", "4")
    assert Verdict([of_rank(8, 8), of_rank(8, None)]).note == "Not measured: in backward."


def test_solved_turns_are_kept_and_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FSDP_TRY_ANSWERS", raising=False)
    monkeypatch.setattr(progress, "_lesson", 0)
    (tmp_path / "src").mkdir()
    source = "# # 0 · A lesson\n# ## Your turn 1 · A\n# ## Your turn 2 · B\n"
    (tmp_path / "src" / "00_a.py").write_text(source)
    for _ in range(2):
        progress.solved(2, tmp_path)
    assert json.loads((tmp_path / progress.FILE).read_text()) == {"00": [2]}
    _, lesson_0, note = repr(progress.progress(tmp_path)).splitlines()
    assert (lesson_0, note) == ("00      A lesson  ○●", "1 of 2 turns solved.")
    (tmp_path / progress.FILE).write_text("not json")
    assert progress.read(tmp_path) == {}


def test_the_card_of_lesson_0_counts_the_turns_of_all_lessons(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FSDP_TRY_ANSWERS", "1")  # as if none were solved
    first, second = (lesson.card(n, learn="a", needs="b", minutes=(1, 2, 3)).data for n in (0, 1))
    assert "All lessons: 0 of 46 turns solved." in first
    assert "All lessons" not in second


def test_answers_are_found_in_a_source() -> None:
    text = '# %% tags=["wrong"] turn=2 says="twice"\nx = 1\n\n# %% tags=["solution"] turn=1\ny = 2\n\n# %%\nz'
    assert your_turn.answers(text) == [
        your_turn.Answer("wrong", 2, "twice", "x = 1"),
        your_turn.Answer("solution", 1, "", "y = 2"),
    ]
