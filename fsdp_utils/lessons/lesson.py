"""The card at the top of a lesson, and the claims that lessons hold."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from IPython.display import Markdown

from fsdp_utils.lessons import progress, your_turn  # noqa: F401 - your_turn makes %%turn known, for each card
from fsdp_utils.lessons.progress import NOTEBOOKS


def card(number: int, *, learn: str, needs: str, minutes: tuple[int, int, int], ranks: str = "") -> Markdown:
    """Show what a lesson teaches, needs and takes, and how many of its turns are solved; 0 counts all turns.

    The minutes are to run the lesson on two cores, to read it, and for the turns.
    """
    to_run, to_read, turns = minutes
    takes = f"{to_run} to run, {to_read} to read, {turns} for the turns · {progress.begin(number)}"
    fields = [learn, needs, ranks or "4 (2 or 3 work: set `FSDP_RANKS`)", takes]
    head = "| learn | needs | ranks | minutes |\n| :-- | :-- | :-- | :-- |"
    of_all = ""
    if number == 0:
        of_all = f"\n\nAll lessons: {progress.progress().note} `make progress` shows which."
    return Markdown(f"{head}\n| {' | '.join(fields)} |{of_all}")


def read_claims(folder: Path = NOTEBOOKS) -> list[dict[str, Any]]:
    """Read all claims of claims.yaml, in its order."""
    return yaml.safe_load((folder / "claims.yaml").read_text(encoding="utf-8"))


def claimed(claim: Mapping[str, Any]) -> str:
    """Return the words of a claim, with who made it."""
    context = ", ".join(str(claim[field]) for field in ("when", "hardware") if claim.get(field))
    words = claim["claim"] if claim.get("paraphrased") else f"“{claim['claim']}”"
    return f"{words} [{claim['who']}]({claim['url']}), {context}"
