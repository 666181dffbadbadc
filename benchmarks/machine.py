"""Shared by the benchmarks: read options, describe the machine, print tables, keep results, check limits."""

import argparse
import datetime
import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RECORDED = ROOT / "notebooks" / "recorded"


def options(doc: str | None, given: Sequence[str] | None = None, **defaults: object) -> argparse.Namespace:
    """Read the options of a script, of the types of their defaults: False is a flag, a list takes several."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(allow_abbrev=False, description=doc, formatter_class=raw)
    for name, default in defaults.items():
        if default is False:
            parser.add_argument(f"--{name}", action="store_true")
        elif isinstance(default, list):
            parser.add_argument(f"--{name}", type=type(default[0]), nargs="+", default=default)
        else:
            parser.add_argument(f"--{name}", type=type(default), default=default)
    return parser.parse_args(given)


def describe(*packages: str) -> str:
    """Return one line: processor, cores, memory, Python, torch and other packages."""
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
    """Return a plain-text table: the first column to the left, the others to the right."""
    cells = [[str(cell) for cell in row] for row in (head, *rows)]
    first, *others = (max(map(len, column)) for column in zip(*cells, strict=True))
    line = "  ".join([f"{{:<{first}}}", *(f"{{:>{width}}}" for width in others)])
    lines = [line.format(*row) for row in cells]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


def commit() -> str:
    """Return the commit of this code, and whether files differ from it.

    A copy of the tree has another: the environment's COMMIT goes before. "unknown" outside a repository.
    """
    if told := os.environ.get("COMMIT"):
        return told
    git = ["git", "-C", str(ROOT)]
    try:
        head, changed = (
            subprocess.check_output([*git, *asked], text=True, stderr=subprocess.DEVNULL).strip()
            for asked in (["rev-parse", "HEAD"], ["status", "--porcelain", "--untracked-files=no"])
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head + (" with changes" if changed else "")


def keep(name: str, doc: str | None, *, group: str, folder: Path = RECORDED, **measured: object) -> Path:
    """Write notebooks/recorded/NAME.json for a lesson: the numbers, and where they were measured.

    Args:
        name: Name of the script in benchmarks/, without its ending, or of a part of it.
        doc: The script's docstring, whose first line is its question.
        group: Which ranks, and how they were joined.
    """
    import torch

    gpu = f"{torch.cuda.get_device_name()}, CUDA {torch.version.cuda}; " if torch.cuda.is_available() else ""
    head = {
        "part": name,
        "question": str(doc).splitlines()[0],
        "device": gpu + describe(),
        "torch": torch.__version__,
        "date": datetime.date.today().isoformat(),
        "commit": commit(),
        "command": shlex.join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]]),
        "group": group,
    }
    file = folder / f"{name}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    new = file.with_suffix(".new")
    new.write_text(json.dumps({**head, **measured}, indent=1) + "\n")
    new.replace(file)
    return file


def limits(held: Mapping[str, bool]) -> int:
    """Print which limits were held. Returns the program's exit code: 1 if one was broken."""
    print()
    for text, good in held.items():
        print("held  " if good else "BROKEN", text)
    return 0 if all(held.values()) else 1
