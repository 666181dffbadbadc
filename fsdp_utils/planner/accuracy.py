"""How far off have these predictions been? As recorded on a GPU, by `python benchmarks/gpu.py planner`."""

import json
from pathlib import Path

RECORDING = Path(__file__).parents[2] / "notebooks" / "recorded" / "planner.json"


def accuracy(file: Path = RECORDING) -> str:
    """One sentence: the median and the worst error, or that none is recorded yet."""
    if not file.exists():
        return "error of this prediction: not recorded yet on any GPU (python benchmarks/gpu.py planner)"
    recording = json.loads(file.read_text(encoding="utf-8"))
    parts = [
        f"{name} {error['median']:.0%} (worst {error['worst']:.0%})"
        for name, error in recording["results"]["errors"].items()
    ]
    return (
        f"error of such predictions, median over {recording['results']['settings']} settings on one "
        f"{recording['device']}: {', '.join(parts)}"
    )
