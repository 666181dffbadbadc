"""The lessons as one series: how they follow each other, and the pages that are about all of them."""

import contextlib
import io
import os
import re
import runpy
import subprocess
import sys
from datetime import timedelta
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch.distributed import TCPStore

from fsdp_utils import run_on_ranks
from fsdp_utils.lessons import progress, your_turn
from tools import build_lessons, claims_page

ROOT = Path(__file__).resolve().parent.parent
TEXTS = {source.stem: source.read_text(encoding="utf-8") for source in build_lessons.sources()}
STEMS = list(TEXTS)


def test_lessons_link_each_other_and_nothing_that_is_not_there() -> None:
    for before, after in pairwise(STEMS):
        assert f"[lesson {int(after[:2])} →]({after}.ipynb)" in TEXTS[before][-1000:]
        assert f"[← lesson {int(before[:2])}]({before}.ipynb)" in TEXTS[after][-1000:]
    for text in TEXTS.values():
        assert set(re.findall(r"\]\((\d\d_\w+)\.ipynb\)", text)) <= set(STEMS)


def test_the_card_of_a_lesson_is_its_own() -> None:
    for stem in STEMS:
        assert f"\nlesson.card(\n    {int(stem[:2])}," in TEXTS[stem], stem


@pytest.mark.parametrize("stem", STEMS)
def test_a_turn_is_one_cell_with_its_answers_beside_it(stem: str) -> None:
    """nbval runs them: a right one has to be accepted, a wrong one refused with the words that it `says`."""
    found, turns = your_turn.answers(TEXTS[stem]), len(progress.turns(TEXTS[stem]))
    assert turns == 2
    for turn in range(1, turns + 1):
        assert TEXTS[stem].count(f"\n# %%turn {turn}\n") == 1
        kinds = [answer.kind for answer in found if answer.turn == turn]
        assert kinds.count("solution") == 1
        assert kinds.count("right") >= 3
        assert kinds.count("wrong") >= 3
    assert [answer.code for answer in found if answer.kind == "wrong" and not answer.says] == []


def script(stem: str) -> tuple[str, str]:
    """Return the script of a lesson that readers copy, and the output that stands beneath it."""
    head = r"# ## The script\n.*?# ```python\n(.*?)# ```\n# ```text\n(.*?)# ```\n"
    ((code, output),) = re.findall(head, TEXTS[stem], re.DOTALL)
    return re.sub(r"^# ?", "", code, flags=re.MULTILINE), re.sub(r"^# ?", "", output, flags=re.MULTILINE)


def printed(code: str, world_size: int = 4, timeout: float = 100) -> str:
    """Run a script as `train.py` in this folder, with the variables and the store that torchrun gives."""
    Path("train.py").write_text(code)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port = str(store.port)

    def on_rank() -> str:
        if torch.distributed.get_rank() and 'init_process_group("fake"' in code:
            return ""  # it would compute the same, and nobody waits for it
        torch.distributed.destroy_process_group()
        # A rank of lesson 15 may leave while others wait for it. Its process lives on: a time-out ends that.
        torch.distributed.distributed_c10d.default_pg_timeout = timedelta(seconds=20)
        agent = {"MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_USE_AGENT_STORE": "True"}
        os.environ.update(agent, MASTER_PORT=port)
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            runpy.run_path("train.py", run_name="__main__")
        return printed.getvalue()

    return "".join(run_on_ranks(on_rank, world_size=world_size, timeout=timeout))


@pytest.mark.parametrize("stem", STEMS)
def test_the_code_to_copy_runs_and_prints_what_stands_beneath_it(
    stem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, output = script(stem)
    monkeypatch.chdir(tmp_path)
    # Lesson 8 runs its script three times: the commands are in the output, and later ones resume.
    command = r"^\$ torchrun --nproc-per-node (\d) train.py\n"
    sizes = re.findall(command, output, re.MULTILINE) or ["4"]
    expected = re.sub(command, "", output, flags=re.MULTILINE)
    assert "".join(printed(code, int(size)) for size in sizes) == expected


def test_the_code_to_copy_runs_under_torchrun(tmp_path: Path) -> None:
    train = tmp_path / "train.py"
    # Ended by _exit. Under load a thread of gloo may let go of its last collective's tensors only when Python
    # is ending; it then asks for the GIL, is ended by pthread_exit and aborts the process.
    ending = "\nimport os\nprint('all lines have run', flush=True)\nos._exit(0)\n"
    train.write_text(script(STEMS[0])[0] + ending)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", train]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("all lines have run") == 2


# ---- the pages


def test_the_readme_lists_every_lesson_with_the_minutes_of_its_card() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    found = re.findall(r"^\| \d+ \| \[[^\]]+\]\(notebooks/(\w+)\.ipynb\) (.*\|)$", text, re.MULTILINE)
    rows = dict(found)
    assert list(rows) == STEMS
    for stem, row in rows.items():
        (takes,) = re.findall(r"^    minutes=\((\d+), (\d+), (\d+)\),$", TEXTS[stem], re.M)
        assert f"| {' · '.join(takes)} |" in row, stem


def test_the_page_of_claims_is_what_its_script_makes_of_the_lessons() -> None:
    assert claims_page.PAGE.read_text(encoding="utf-8") == claims_page.page(), "python tools/claims_page.py"


def test_the_glossary_is_in_order_and_each_term_is_in_the_lesson_that_it_links() -> None:
    text = (ROOT / "notebooks" / "glossary.md").read_text(encoding="utf-8")
    entries = re.findall(r"^- \*\*(.+?)\*\*: (.+?)(?=^- |\Z)", text, re.MULTILINE | re.DOTALL)
    assert len(entries) > 30
    terms = [term for term, _ in entries]
    assert terms == sorted(terms, key=str.casefold)
    for term, about in entries:
        (stem,) = re.findall(r"\[Lesson \d+\]\((\w+)\.ipynb\)", about)
        said = TEXTS[stem].casefold().replace("\n# ", " ").replace("_", " ")
        assert any(word.casefold().replace("_", " ") in said for word in term.split(", ")), term


def test_videos_name_lessons_1_to_11_with_a_link_and_a_part_that_runs_beside_it() -> None:
    text = (ROOT / "videos.md").read_text(encoding="utf-8")
    watch = r"\[watch\]\((https://www\.loom\.com/share/[0-9a-f]{32})\)"
    row = rf"^\| (\d+) [^|]+\(notebooks/(\w+)\.ipynb\) \| {watch} (.*) \|$"
    rows = re.findall(row, text, re.MULTILINE)
    assert [int(number) for number, *_ in rows] == list(range(1, 12))
    assert len({link for _, _, link, _ in rows}) == 11
    for _, stem, _, ending in rows:
        for part in re.findall(r"“([^”]+)”$", ending):
            assert f"# ## {part}\n" in TEXTS[stem], stem
