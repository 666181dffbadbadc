"""The table of claims of a lesson."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from IPython.display import Markdown

_CHECKOUT = Path(__file__).parents[2] / "notebooks"
# where the library is installed without -e, as in Colab: the folder of the notebook that runs
NOTEBOOKS = _CHECKOUT if _CHECKOUT.is_dir() else Path.cwd()


def claims(lesson: int, measured: Mapping[str, str], *, folder: Path = NOTEBOOKS) -> Markdown:
    """Show the claims of a lesson beside what the lesson measured.

    Args:
        lesson: Number of the lesson whose claims in claims.yaml are shown.
        measured: By the claim's id, what the lesson's cells found: words with the number.
        folder: Holds claims.yaml, whose head describes the fields.

    Raises:
        ValueError: A claim of the lesson was not measured, or the lesson has no claim of that id.
    """
    found = [claim for claim in read_claims(folder) if claim["lesson"] == lesson]
    ids = {claim["id"] for claim in found}
    if ids != set(measured):
        raise ValueError(
            f"lesson {lesson} has the claims {sorted(ids)} in {folder.name}/claims.yaml, but measurements "
            f"were given for {sorted(measured)}. Give each claim its own: claims({lesson}, {{id: text}})."
        )
    # all columns aligned left: JupyterLab's default is right
    rows = [f"| {_claimed(claim)} | {measured[claim['id']]} |" for claim in found]
    return Markdown("\n".join(["| Claimed | Measured here |", "| :-- | :-- |", *rows]))


def read_claims(folder: Path = NOTEBOOKS) -> list[dict[str, Any]]:
    """Read all claims of claims.yaml, in its order."""
    return yaml.safe_load((folder / "claims.yaml").read_text(encoding="utf-8"))


def _claimed(claim: Mapping[str, Any]) -> str:
    context = ", ".join(str(claim[field]) for field in ("when", "hardware") if claim.get(field))
    words = claim["claim"] if claim.get("paraphrased") else f"“{claim['claim']}”"
    return f"{words} [{claim['who']}]({claim['url']}), {context}"
