"""The stored notebooks are what their sources say, and the tools that see to it do see faults."""

import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook, new_output

from tools import build_lessons

ROOT = Path(__file__).resolve().parent.parent
LESSONS = build_lessons.sources()

LESSON = """\
# %% [markdown]
# # A lesson

# %%
import fsdp_utils
from IPython.display import clear_output, display

print("one")
print("two", flush=True)
print("three")

# %%
handle = display("while it runs", display_id=True)
handle.update("at the end")
print("gone")
clear_output(wait=True)
print("stays")

# %% tags=["raises-exception"]
import json
json.loads("not json")

# %%
[fsdp_utils.__name__];
"""


# --- the lessons that are stored here


def test_every_notebook_has_a_source() -> None:
    assert {path.stem for path in (ROOT / "notebooks").glob("*.ipynb")} == {path.stem for path in LESSONS}


@pytest.mark.parametrize("source", LESSONS, ids=lambda source: source.stem)
def test_notebook_is_its_source_executed_in_order_with_clean_outputs(source: Path) -> None:
    assert build_lessons.twin_problems(source) == []
    notebook = nbformat.read(build_lessons.notebook_of(source), as_version=4)
    assert build_lessons.notebook_problems(notebook) == []


# --- the tools


@pytest.fixture
def lesson(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The source of a lesson in a folder of its own."""
    source = tmp_path / "notebooks" / "src" / "00_a_lesson.py"
    source.parent.mkdir(parents=True)
    source.write_text(LESSON)
    monkeypatch.setattr(build_lessons, "NOTEBOOKS", tmp_path / "notebooks")
    return source


def build(source: Path) -> list[str]:
    return build_lessons.build(source, on_cell=lambda: None).problems


def test_a_lesson_is_built_tidy_the_same_each_time_and_nbval_sees_a_changed_output(lesson: Path) -> None:
    notebook = build_lessons.notebook_of(lesson)
    assert build(lesson) == []
    first = notebook.read_bytes()
    assert build(lesson) == []
    assert notebook.read_bytes() == first

    cells = nbformat.read(notebook, as_version=4).cells
    assert [cell.id for cell in cells] == ["00-000", "00-001", "00-002", "00-003", "00-004"]
    assert [output.text for output in cells[1].outputs] == ["one\ntwo\nthree\n"]
    assert [output.text for output in cells[2].outputs] == ["stays\n"]
    assert "json/__init__.py" in "".join(cells[3].outputs[0].traceback)
    assert build_lessons.twin_problems(lesson) == []

    shutil.copy(ROOT / "notebooks" / "conftest.py", notebook.parent)
    changed = notebook.with_name("changed.ipynb")
    changed.write_text(notebook.read_text().replace(r"stays\n", r"stayed\n"))  # the output, not the source
    nbval = ["--nbval", "--nbval-current-env", "-p", "no:cacheprovider", f"--rootdir={ROOT}"]
    command = [sys.executable, "-m", "pytest", *nbval, "-c", ROOT / "pyproject.toml", notebook.parent]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert "1 failed, 7 passed" in done.stdout, done.stdout
    assert "'stayed\\n' == 'stays\\n'" in done.stdout


def test_a_lesson_that_fails_is_not_written_and_the_cell_is_named(lesson: Path) -> None:
    lesson.write_text("# %%\nimport fsdp_utils\n\n# %%\n1 / 0\n")
    assert "cell 00-001 (1 / 0): ends in ZeroDivisionError: division by zero" in build(lesson)
    assert not build_lessons.notebook_of(lesson).exists()


def test_outputs_that_another_machine_cannot_repeat_are_refused() -> None:
    named = {
        "saved to /home/someone/model.pt": "an absolute path: /home/someone",
        "File ~/project/train.py:3": "an absolute path: ~/project",
        "FutureWarning: soon gone": "a warning: FutureWarning",
        "<function f at 0x7f00aabbccdd>": "an object address: at 0x7f00aabbccdd",
        "loss 0.30000000000000004": "a float of more than ten digits: 0.30000000000000004",
    }
    cell = new_code_cell("import fsdp_utils", id="00-000", execution_count=1)
    cell.metadata["tags"] = ["raises-exception"]
    for text, problem in named.items():
        shown = {"text/html": text, "image/png": "/home/in/a/picture"}
        for output in (
            new_output("stream", text=f"\x1b[31m{text}\x1b[0m"),
            new_output("error", ename="E", evalue="", traceback=[text]),
            new_output("display_data", data=shown),
        ):
            cell.outputs = [output]
            problems = build_lessons.notebook_problems(new_notebook(cells=[cell]))
            assert problems == [f"cell 00-000 (import fsdp_utils): its output holds {problem}"]


def test_notebooks_not_run_in_order_too_large_or_without_the_library_are_refused() -> None:
    large = new_output("stream", text="x" * build_lessons.LARGEST_BYTES)
    cells = [new_code_cell("1", execution_count=2, outputs=[large]), new_code_cell("2", execution_count=1)]
    order, library, size = build_lessons.notebook_problems(new_notebook(cells=cells))
    assert "not all executed, in order" in order
    assert "does not import fsdp_utils" in library
    assert "1.5 MB" in size


def test_twins_that_drift_apart_are_seen(lesson: Path) -> None:
    assert build_lessons.twin_problems(lesson) == [
        "00_a_lesson.ipynb does not exist: run make lessons ONLY=00"
    ]
    nbformat.write(build_lessons.read_source(lesson), build_lessons.notebook_of(lesson))
    assert build_lessons.twin_problems(lesson) == []

    lesson.write_text(LESSON.replace("# # A lesson", "# # Another lesson").replace("# %% tags", "# %% tag"))
    assert build_lessons.twin_problems(lesson) == [
        "cell 00-000 (# Another lesson): source differs between source and notebook",
        "cell 00-003 (import json): metadata differs between source and notebook",
    ]
    lesson.write_text(LESSON + "\n# %%\n1\n")
    assert build_lessons.twin_problems(lesson) == ["6 cells in the source, 5 in the notebook"]


WITH_A_TURN = """\
# %% tags=["card"]
from fsdp_utils.lessons import lesson

lesson.card(0, learn="what shards are", needs="nothing", minutes=(1, 5, 5))

# %% tags=["check"]
# %%ranks
import fsdp_utils
print("Checked: all.")

# %% tags=["solution"] turn=1
# %%ranks
result = 8

# %% tags=["wrong"] turn=1
result = 7
"""


def test_cards_solutions_and_checks_are_published_for_every_viewer(lesson: Path) -> None:
    lesson.write_text(WITH_A_TURN)
    card, check, solution = build_lessons.read_source(lesson).cells
    assert card.metadata.jupyter.source_hidden
    assert check.metadata.jupyter.source_hidden
    assert solution.cell_type == "markdown"
    assert solution.source.startswith("<details><summary>Solution</summary>")
    assert "```python\n%%ranks\nresult = 8\n```" in solution.source
