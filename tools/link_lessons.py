"""Write the last line of each lesson's "Next": links to the lesson before and to the one after.

    python tools/link_lessons.py

Text alone is changed, so a notebook whose code is that of its source needs no new run.
"""

import re
import sys
from pathlib import Path

import nbformat

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tools import build_lessons

LINKS = re.compile(r"(# \[(?:←|lesson)[^\n]*\n?)+\Z")


def link(source: Path, before: Path | None, after: Path | None) -> None:
    """Put the links at the end of a source, and the source's text into its notebook."""
    links = []
    if before:
        links.append(f"[← lesson {int(before.stem[:2])}]({before.stem}.ipynb)")
    if after:
        links.append(f"[lesson {int(after.stem[:2])} →]({after.stem}.ipynb)")
    line = f"# {' · '.join(links)}\n"
    if len(line) > 110:
        line = "# " + " ·\n# ".join(links) + "\n"
    text, found = LINKS.subn(line, source.read_text(encoding="utf-8"))
    if not found:
        raise ValueError(f"{source.name}: expected links to other lessons in its last lines")
    source.write_text(text, encoding="utf-8")

    path = build_lessons.notebook_of(source)
    if path.exists():
        theirs, ours = nbformat.read(path, as_version=4), build_lessons.read_source(source)
        code = [[cell.source for cell in build_lessons.code_cells(lesson)] for lesson in (ours, theirs)]
        kinds = [[cell.cell_type for cell in lesson.cells] for lesson in (ours, theirs)]
        if code[0] == code[1] and kinds[0] == kinds[1]:
            for mine, stored in zip(ours.cells, theirs.cells, strict=True):
                if mine.cell_type == "markdown":
                    stored.source = mine.source
            nbformat.write(theirs, path)


def main() -> int:
    lessons = build_lessons.sources()
    for source, before, after in zip(lessons, [None, *lessons], [*lessons[1:], None], strict=False):
        link(source, before, after)
    return 0


if __name__ == "__main__":
    sys.exit(main())
