"""Write notebooks/claims.md: every claim of claims.yaml beside what a lesson has measured, by lesson.

python tools/claims_page.py
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

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


def read_claims() -> list[dict[str, Any]]:
    """Read all claims of claims.yaml, in its order."""
    return yaml.safe_load((NOTEBOOKS / "claims.yaml").read_text(encoding="utf-8"))


def claimed(claim: Mapping[str, Any]) -> str:
    """Return the words of a claim, with who made it."""
    context = ", ".join(str(claim[field]) for field in ("when", "hardware") if claim.get(field))
    words = claim["claim"] if claim.get("paraphrased") else f"“{claim['claim']}”"
    return f"{words} [{claim['who']}]({claim['url']}), {context}"


def page() -> str:
    """Return the page as it should be."""
    text, claims = TOP, read_claims()
    for path in sorted(NOTEBOOKS.glob("src/[0-9][0-9]_*.py")):
        title = path.read_text(encoding="utf-8").splitlines()[1].partition("·")[2].strip()
        own = [claim for claim in claims if claim["lesson"] == int(path.name[:2])]
        rows = [f"| {claimed(claim)} | {claim['found']} |" for claim in own]
        if rows:
            text += f"\n## {int(path.name[:2])} [{title}]({path.stem}.ipynb)\n\n"
            text += "\n".join([HEAD, "| :-- | :-- |", *rows]) + "\n"
    return text


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(f"{PAGE.name}: written")
