"""Write notebooks/claims.md: every claim of claims.yaml beside what the lessons, as stored, have measured.

    python tools/claims_page.py

The tables are those that the lessons show themselves, taken from the executed notebooks.
"""

import sys
from pathlib import Path

import nbformat
import yaml

NOTEBOOKS = Path(__file__).resolve().parent.parent / "notebooks"
PAGE = NOTEBOOKS / "claims.md"
HEAD = "| Claimed | Measured here |"
TOP = """\
# Claims, then and now

What others have written about FSDP, who and when, beside what a cell of a lesson measured on a CPU.
Quotation marks are around the words of the source. Which cell measures a claim is in
[claims.yaml](claims.yaml). This page is made by `python tools/claims_page.py`.
"""


def tables(notebook: Path) -> list[str]:
    """The lesson's claims, as it shows them."""
    cells = nbformat.read(notebook, as_version=4).cells
    outputs = [output for cell in cells if cell.cell_type == "code" for output in cell.outputs]
    texts = [output.data.get("text/markdown", "") for output in outputs if "data" in output]
    return [text for text in texts if text.startswith(HEAD)]


def title(notebook: Path) -> str:
    """The lesson's own title, without its number."""
    first = nbformat.read(notebook, as_version=4).cells[0].source.splitlines()[0]
    return first.lstrip("# ").partition("·")[2].strip()


def page() -> str:
    """The page, as it should be."""
    parts = [TOP]
    for notebook in sorted(NOTEBOOKS.glob("[0-9][0-9]_*.ipynb")):
        found = tables(notebook)
        if found:
            parts.append(
                f"\n## {int(notebook.name[:2])} [{title(notebook)}]({notebook.name})\n\n{found[0]}\n"
            )
    return "".join(parts)


def unseen() -> list[str]:
    """Claims of claims.yaml whose source is on no lesson's table."""
    shown = page()
    claims = yaml.safe_load((NOTEBOOKS / "claims.yaml").read_text(encoding="utf-8"))
    return [claim["id"] for claim in claims if claim["url"] not in shown]


def main() -> int:
    PAGE.write_text(page(), encoding="utf-8")
    count = sum(table.count("\n") - 1 for n in NOTEBOOKS.glob("*.ipynb") for table in tables(n))
    print(f"{PAGE.name}: {count} claims")
    return 0


if __name__ == "__main__":
    sys.exit(main())
