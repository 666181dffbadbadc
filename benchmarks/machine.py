"""What a benchmark's numbers were measured on, how they are shown and kept, and which limits they held."""

import datetime
import json
import os
import platform
import shlex
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path


def describe(*packages: str) -> str:
    """One line: processor, cores, memory, Python, torch and other packages."""
    import psutil

    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    memory_gib = psutil.virtual_memory().total / 2**30
    versions = ", ".join(f"{package} {version(package)}" for package in ("torch", *packages))
    return (
        f"{names[0] if names else platform.processor() or platform.machine()}, {os.cpu_count()} cores, "
        f"{memory_gib:.0f} GiB, {platform.system()}, Python {platform.python_version()}, {versions}"
    )


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A plain-text table; the first column to the left, the others to the right."""
    cells = [[str(cell) for cell in row] for row in (head, *rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in cells
    ]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


def keep(name: str, doc: str | None, *, group: str, **measured: object) -> Path:
    """Write notebooks/recorded/NAME.json for a lesson: the numbers, and what they were measured on.

    Args:
        name: Of the script in benchmarks/, without its ending.
        doc: The script's docstring, whose first line is its question.
        group: Which ranks, and how they were joined.
        measured: What else the file holds.
    """
    import torch

    from benchmarks.gpu_parts.recorder import RECORDED, ROOT, commit_of

    head = {
        "part": name,
        "question": str(doc).splitlines()[0],
        "device": describe(),
        "torch": torch.__version__,
        "date": datetime.date.today().isoformat(),
        "commit": commit_of(ROOT),
        "command": shlex.join(["python", f"benchmarks/{name}.py", *sys.argv[1:]]),
        "group": group,
    }
    file = RECORDED / f"{name}.json"
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps({**head, **measured}, indent=1) + "\n")
    return file


def limits(held: Mapping[str, bool]) -> int:
    """Print which limits were held. Returns the program's exit code: 1 if one was broken."""
    print()
    for text, good in held.items():
        print("held  " if good else "BROKEN", text)
    return 0 if all(held.values()) else 1
