"""Stored measurements of notebooks/recorded, which scripts of benchmarks/ write."""

import json
from pathlib import Path
from typing import Any

from IPython.display import Markdown

from fsdp_utils.lessons.lesson import NOTEBOOKS


def load(part: str, *, folder: Path = NOTEBOOKS) -> dict[str, Any] | None:
    """Return recorded/PART.json, with the device and date of its measurement; None while there is none."""
    path = folder / "recorded" / f"{part}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def caption(part: str, *, folder: Path = NOTEBOOKS) -> Markdown:
    """Say on which device a recording was made and when, or how to make it; arguments as for `load`."""
    recording = load(part, folder=folder)
    if recording is None:
        told = "`python benchmarks/gpu.py` measures this on a machine with a GPU"
        return Markdown(f"*Not recorded yet: {told}.*")
    device, version = recording["device"], f"torch {recording['torch']}"
    if version not in device:  # `benchmarks/machine.py` names it there on a machine without a GPU
        device += f", {version}"
    group = f", {recording['group']}" if recording["group"] else ""
    return Markdown(f"*Recorded on {device}, {recording['date']}{group}.*")
