"""Stored measurements of notebooks/recorded, which scripts of benchmarks/ write."""

import json
from pathlib import Path
from typing import Any

from IPython.display import Markdown

from fsdp_utils.lessons.progress import NOTEBOOKS


def load(part: str, *, folder: Path = NOTEBOOKS) -> dict[str, Any]:
    """Return recorded/PART.json, with the device and date of its measurement."""
    return json.loads((folder / "recorded" / f"{part}.json").read_text(encoding="utf-8"))


def caption(part: str, *, folder: Path = NOTEBOOKS) -> Markdown:
    """Say on which device a recording was made and when; arguments as for `load`."""
    recording = load(part, folder=folder)
    device, version = recording["device"], f"torch {recording['torch']}"
    if version not in device:  # `benchmarks/machine.py` names it there on a machine without a GPU
        device += f", {version}"
    group = f", {recording['group']}" if recording["group"] else ""
    return Markdown(f"*Recorded on {device}, {recording['date']}{group}.*")
