"""How far off have these predictions been? As recorded on a GPU, by `python benchmarks/gpu.py planner`.

A copy of the library without notebooks/ has no recording, and says so.
"""

import json
from pathlib import Path

RECORDING = Path(__file__).parents[2] / "notebooks" / "recorded" / "planner.json"


def accuracy(file: Path = RECORDING) -> str:
    """One sentence: the median and the worst error, or that no recording is there to state one from."""
    if not file.exists():
        return "error of this prediction: not known here, as no recording from a GPU is there to tell it"
    recording = json.loads(file.read_text(encoding="utf-8"))
    parts = [
        f"{name} {error['median']:.0%} (worst {error['worst']:.0%})"
        for name, error in recording["results"]["errors"].items()
    ]
    return (
        f"error of such predictions, median over {recording['results']['settings']} settings of one rank on "
        f"one {recording['device']}: {', '.join(parts)}"
    )
