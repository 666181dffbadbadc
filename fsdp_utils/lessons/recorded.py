"""Read the measurements made on GPUs: notebooks/recorded, which `benchmarks/gpu.py` writes."""

import json
from pathlib import Path
from typing import Any

from IPython.display import Markdown

from fsdp_utils.lessons.lesson import NOTEBOOKS


def load(part: str, *, folder: Path = NOTEBOOKS) -> dict[str, Any] | None:
    """Load what was recorded for one part.

    Args:
        part: The name of its file in notebooks/recorded, without its ending.
        folder: Holds recorded/.

    Returns:
        The recording: "results" is what to quote, "settings" the raw numbers, the rest says where they are
        from. None while there is none.
    """
    path = folder / "recorded" / f"{part}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def caption(part: str, *, folder: Path = NOTEBOOKS) -> Markdown:
    """A caption for recorded numbers: on which device they were measured, and when.

    Args:
        part: As for `load`.
        folder: Holds recorded/.

    Returns:
        One sentence. Where nothing is recorded yet it says so, and with which command it would be.
    """
    recording = load(part, folder=folder)
    if recording is None:
        return Markdown(
            f"*Not recorded yet: `python benchmarks/gpu.py {part}` measures this on a machine with a GPU.*"
        )
    device, version = recording["device"], f"torch {recording['torch']}"
    if version not in device:  # as in what `benchmarks/machine.py` says of a machine without a GPU
        device += f", {version}"
    group = f", {recording['group']}" if recording["group"] else ""
    return Markdown(f"*Recorded on {device}, {recording['date']}{group}.*")
