"""Draw the map of the lessons, which needs which, from their cards: the first picture of the book."""

import re
import sys
from dataclasses import dataclass
from html import escape
from pathlib import Path

import jupytext

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tools import build_lessons

WIDTH, HEIGHT, ACROSS, DOWN = 214, 44, 240, 52


@dataclass
class Lesson:
    page: str
    title: str
    minutes: str
    needs: list[str]  # pages
    column: int = 0
    row: int = 0


def lessons() -> dict[str, Lesson]:
    """The lessons by page, with what each needs and no other lesson that it needs brings along."""
    found: dict[str, Lesson] = {}
    for source in build_lessons.sources():
        card = build_lessons.card_of(source)
        title = re.search(r"^# (.+)$", jupytext.read(source, fmt="py:percent").cells[0].source, re.MULTILINE)
        minutes = re.search(r"(\d+) minutes to read", card["takes"])
        if not title or not minutes:
            raise ValueError(f"{source.name}: expected a heading first, and minutes to read in its card")
        needs = re.findall(r"\(([\w]+)\.ipynb\)", card["needs"])
        found[source.stem] = Lesson(source.stem, title[1], minutes[1], needs)
    for lesson in found.values():  # a lesson needs earlier ones only, whose columns are known by now
        lesson.column = max((found[need].column + 1 for need in lesson.needs), default=0)
    for lesson in found.values():
        lesson.needs = [
            need for need in lesson.needs if not any(need in found[other].needs for other in lesson.needs)
        ]
    return found


def draw(found: dict[str, Lesson]) -> str:
    """The map as SVG to stand in a page: it takes the page's colours, and its boxes are links."""
    columns = [
        [one for one in found.values() if one.column == n]
        for n in range(1 + max(one.column for one in found.values()))
    ]
    rows = max(map(len, columns))
    place = {
        one.page: (column * ACROSS + 1, (row + (rows - len(inside)) / 2) * DOWN + 1)
        for column, inside in enumerate(columns)
        for row, one in enumerate(inside)
    }
    width, height = (len(columns) - 1) * ACROSS + WIDTH + 2, (rows - 1) * DOWN + HEIGHT + 2
    parts = [
        f'<svg class="lesson-map" viewBox="0 0 {width} {height}" role="img" '
        'aria-label="Map of the lessons: each stands to the right of those that it needs">'
    ]
    for one in found.values():
        x, y = place[one.page]
        for need in one.needs:
            left, top = place[need]
            left, top, right, bottom = left + WIDTH, top + HEIGHT / 2, x, y + HEIGHT / 2
            half = (left + right) / 2
            parts.append(
                f'<path d="M{left:g} {top:g}C{half:g} {top:g} {half:g} {bottom:g} {right:g} {bottom:g}"/>'
            )
    for one in found.values():
        x, y = place[one.page]
        parts.append(
            f'<a href="notebooks/{one.page}.html">'
            f'<rect x="{x:g}" y="{y:g}" width="{WIDTH}" height="{HEIGHT}" rx="6"/>'
            f'<text x="{x + 10:g}" y="{y + 18:g}">{escape(_short(one.title))}</text>'
            f'<text class="minutes" x="{x + 10:g}" y="{y + 35:g}">{one.minutes} minutes</text></a>'
        )
    return "\n".join([*parts, "</svg>"])


def _short(title: str) -> str:
    return title if len(title) <= 28 else title[:27].rsplit(" ", 1)[0] + " …"
