"""Write notebooks/claims.md: every claim of claims.yaml beside what the lessons, as stored, have measured.

    python tools/claims_page.py

What was measured stands in claims.yaml as `found`; else in the table that the executed lesson shows.
"""

from pathlib import Path

import nbformat

from fsdp_utils.lessons.lesson import claimed, read_claims

NOTEBOOKS = Path(__file__).resolve().parent.parent / "notebooks"
PAGE = NOTEBOOKS / "claims.md"
HEAD = "| Claimed | Measured here |"
TOP = """\
# Claims, then and now

What others have written about FSDP, who and when, beside what a cell of a lesson measured on a CPU.
Quotation marks are around the words of the source. Which cell measures a claim is in
[claims.yaml](claims.yaml). This page is made by `python tools/claims_page.py`.
"""


def page() -> str:
    """Return the page as it should be."""
    text, claims = TOP, read_claims(NOTEBOOKS)
    for path in sorted(NOTEBOOKS.glob("[0-9][0-9]_*.ipynb")):
        cells = nbformat.read(path, as_version=4).cells
        title = cells[0].source.splitlines()[0].partition("·")[2].strip()
        outputs = [output for cell in cells for output in cell.get("outputs", []) if "data" in output]
        shown = [output.data.get("text/markdown", "") for output in outputs]
        own = [claim for claim in claims if claim["lesson"] == int(path.name[:2]) and "found" in claim]
        rows = [f"| {claimed(claim)} | {claim['found']} |" for claim in own]
        tables = ["\n".join([HEAD, "| :-- | :-- |", *rows])] if own else shown
        for table in [table for table in tables if table.startswith(HEAD)][:1]:
            text += f"\n## {int(path.name[:2])} [{title}]({path.name})\n\n{table}\n"
    return text


def unseen() -> list[str]:
    """Return the claims of claims.yaml whose source no lesson's table shows."""
    shown = page()
    return [claim["id"] for claim in read_claims(NOTEBOOKS) if claim["url"] not in shown]


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(f"{PAGE.name}: written")
