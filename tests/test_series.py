"""The lessons as one series: how they follow each other, and the pages that are about all of them."""

import os
import re
import runpy
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch.distributed import TCPStore

from fsdp_utils import run_on_ranks
from fsdp_utils.lessons.turns import answers
from tools import build_lessons, claims_page

ROOT = Path(__file__).resolve().parent.parent
LESSONS = build_lessons.sources()
TEXTS = {source.stem: source.read_text(encoding="utf-8") for source in LESSONS}
STEMS = list(TEXTS)


def number(stem: str) -> int:
    return int(stem[:2])


@pytest.mark.parametrize(("before", "after"), list(pairwise(STEMS)))
def test_a_lesson_links_the_next_one_and_is_linked_back(before: str, after: str) -> None:
    ending = TEXTS[before].partition("\n# ## Next\n")[2].partition("# ## Solutions")[0]
    assert f"[lesson {number(after)} →]({after}.ipynb)" in ending
    assert f"[← lesson {number(before)}]({before}.ipynb)" in TEXTS[after].partition("\n# ## Next\n")[2]


@pytest.mark.parametrize("stem", STEMS)
def test_links_between_lessons_lead_to_lessons(stem: str) -> None:
    links = re.findall(r"\]\((\d\d_\w+)\.ipynb\)", TEXTS[stem])
    assert links
    assert set(links) <= set(STEMS)


@pytest.mark.parametrize("stem", STEMS)
def test_every_exercise_has_a_solution_that_is_checked_strictly(stem: str) -> None:
    """nbval runs the solutions: as cells with a strict check, or by `try_answers`, which raises too."""
    turns = len(re.findall(r"^# ## Your turn \d+ · ", TEXTS[stem], re.MULTILINE))
    if turns:
        found = answers(TEXTS[stem])
        cells = TEXTS[stem].split('# %% tags=["exercise"]\n')[1:]
        stubs = [set(re.findall(r"^(?:def|class) (\w+)", c.partition("\n# %% ")[0], re.M)) for c in cells]
        assert turns >= 2
        for turn in range(1, turns + 1):
            kinds = [answer.kind for answer in found if answer.turn == turn]
            assert kinds.count("solution") == 1
            assert "wrong" in kinds
            # The turn scores, by its own call, what the reader writes in the stub; nothing is kept beside it.
            names = re.findall(rf'^turn\(\n    {turn},\n    "\w+\((.+)\)",', TEXTS[stem], re.MULTILINE)
            assert len(names) == 1
            assert set(names[0].split(", ")) in stubs
        assert not re.search(r"^result\b", TEXTS[stem], re.MULTILINE)
        assert f"\ntry_answers({number(stem)})\n" in TEXTS[stem]
        return
    exercises, solutions = TEXTS[stem].split("# ## Solutions\n")
    tagged = re.findall(r'^# %% .*tags=\[.*"solution".*\]', solutions, re.MULTILINE)
    asked = len(re.findall(r"^# \*\*\d+\. ", exercises.partition("# ## Exercises")[2], re.MULTILINE))
    strict = solutions.count("strict=True)")
    assert asked >= 2
    assert strict >= asked
    assert len(tagged) >= asked


def to_copy(stem: str) -> str:
    """The script of a lesson that readers copy."""
    (block,) = re.findall(r"# ## In your own code\n.*?# ```python\n(.*?)# ```\n", TEXTS[stem], re.DOTALL)
    return re.sub(r"^# ?", "", block, flags=re.MULTILINE)


WITH_A_SCRIPT = [stem for stem in STEMS if "# ## In your own code\n" in TEXTS[stem]]


@pytest.mark.parametrize("stem", WITH_A_SCRIPT)
def test_the_code_to_copy_runs_on_two_ranks(
    stem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the variables and the store that torchrun gives to its processes."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(to_copy(stem))
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port = str(store.port)

    def on_rank() -> str:
        torch.distributed.destroy_process_group()
        agent = {"MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_USE_AGENT_STORE": "True"}
        os.environ.update(agent, MASTER_PORT=port)
        runpy.run_path("train.py", run_name="__main__")
        return "all lines have run"

    assert run_on_ranks(on_rank, timeout=100) == ["all lines have run"] * 2


def test_the_code_to_copy_runs_under_torchrun(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    # Ended by _exit. Under load a thread of gloo may let go of its last collective's tensors only when Python
    # is ending; it then asks for the GIL, is ended by pthread_exit and aborts the process.
    ending = "\nimport os\nprint('all lines have run', flush=True)\nos._exit(0)\n"
    script.write_text(to_copy(WITH_A_SCRIPT[0]) + ending)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", script]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("all lines have run") == 2


def rows_of_readme() -> dict[str, str]:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    return dict(re.findall(r"^\| \d+ \| \[[^\]]+\]\(notebooks/(\w+)\.ipynb\) (.*)\|$", text, re.MULTILINE))


def test_the_readme_lists_every_lesson_with_the_minutes_of_its_card() -> None:
    rows = rows_of_readme()
    assert list(rows) == STEMS
    for stem, row in rows.items():
        card = build_lessons.card_of(build_lessons.SOURCES / f"{stem}.py")
        (takes,) = re.findall(r"^(.+) to run on .* (\d+) minutes to read$", card["takes"])
        assert f"| {takes[0]} · {takes[1]} |" in row, stem


def test_the_page_of_claims_is_what_its_script_makes_of_the_lessons() -> None:
    assert claims_page.PAGE.read_text(encoding="utf-8") == claims_page.page(), "python tools/claims_page.py"
    assert claims_page.unseen() == []


def test_the_glossary_is_in_order_and_each_term_is_in_the_lesson_that_it_links() -> None:
    text = (ROOT / "notebooks" / "glossary.md").read_text(encoding="utf-8")
    entries = re.findall(r"^- \*\*(.+?)\*\*: (.+?)(?=^- |\Z)", text, re.MULTILINE | re.DOTALL)
    assert len(entries) > 30
    terms = [term for term, _ in entries]
    assert terms == sorted(terms, key=str.casefold)
    for term, about in entries:
        (stem,) = re.findall(r"\[Lesson \d+\]\((\w+)\.ipynb\)", about)
        said = TEXTS[stem].casefold().replace("_", " ")
        assert any(word.casefold().replace("_", " ") in said for word in term.split(", ")), term


def test_videos_name_parts_of_the_lessons_that_run_beside_them() -> None:
    text = (ROOT / "videos.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| \d+ \[[^\]]+\]\(notebooks/(\w+)\.ipynb\) .* “([^”]+)” \|$", text, re.MULTILINE)
    assert len(rows) >= 10
    for stem, part in rows:
        assert f"# ## {part}\n" in TEXTS[stem], stem
