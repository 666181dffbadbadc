"""The lessons as one series: how they follow each other, and the pages that are about all of them."""

import re
from itertools import pairwise
from pathlib import Path

import pytest

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
    """The solutions are cells like all others: nbval runs them, and a strict check raises."""
    exercises, solutions = TEXTS[stem].split("# ## Solutions\n")
    tagged = re.findall(r'^# %% .*tags=\[.*"solution".*\]', solutions, re.MULTILINE)
    asked = len(re.findall(r"^# \*\*\d+\. ", exercises.partition("# ## Exercises")[2], re.MULTILINE))
    strict = solutions.count("strict=True)")
    assert asked >= 2
    assert strict >= asked
    assert len(tagged) >= asked


def rows_of_readme() -> dict[str, str]:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    return dict(re.findall(r"^\| \d+ \| \[[^\]]+\]\(notebooks/(\w+)\.ipynb\) (.*)\|$", text, re.MULTILINE))


def test_the_readme_lists_every_lesson_with_the_minutes_of_its_card() -> None:
    rows = rows_of_readme()
    assert list(rows) == STEMS
    for stem, row in rows.items():
        (takes,) = re.findall(
            r'^ +takes="(.+) to run on .* (\d+) minutes to read"', TEXTS[stem], re.MULTILINE
        )
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
