"""Has a part measured in processes of its own, and keeps the recording.

Results go to PART.partial.jsonl beside the recording as they come, so that an interrupted run goes on from
there. When all are there, the recording is written and the partial file removed.
"""

import datetime
import hashlib
import importlib
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_parts.worker import environment, missing, read, write

ROOT = Path(__file__).resolve().parent.parent.parent
RECORDED = ROOT / "notebooks" / "recorded"


@dataclass(frozen=True)
class Run:
    """One call of the command."""

    device: str  # "cuda" or "cpu"
    tiny: bool  # a dry run: small sizes, never kept among the recordings
    folder: Path
    command: str
    commit: str
    limit_s: float = 480.0  # for each part

    def __post_init__(self) -> None:
        if self.tiny and self.folder.resolve() == RECORDED:
            raise ValueError(f"a dry run is no recording: choose another folder than {RECORDED}")


def code_hash(module: str) -> str:
    """Of the part's file and those that it names in USES: with another hash a recording is stale."""
    part = importlib.import_module(module)
    digest = hashlib.sha256()
    for file in (Path(str(part.__file__)), *(ROOT / name for name in part.USES)):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def commit_of(folder: Path) -> str:
    """The git commit, and whether files differ from it; "unknown" outside a repository."""
    try:
        git = ["git", "-C", str(folder)]
        commit = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
        status = [*git, "status", "--porcelain", "--untracked-files=no"]
        changed = subprocess.run(status, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return commit.stdout.strip() + (" with changes" if changed.stdout.strip() else "")


def question(module: str) -> str:
    """The first line of the part's docstring."""
    return str(importlib.import_module(module).__doc__).splitlines()[0]


def machine(device: str) -> dict[str, Any]:
    """What a recording says about where it was made."""
    about: dict[str, Any] = {
        "device": platform.processor() or platform.machine(),
        "device_memory_gib": None,
        "driver": None,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "transformers": version("transformers"),
    }
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        about |= {"device": properties.name, "device_memory_gib": properties.total_memory / 2**30}
        about["driver"] = _driver()
    return about


def _driver() -> str | None:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(query, capture_output=True, text=True, check=True, timeout=30).stdout.split()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        return None


def state(module: str, folder: Path = RECORDED) -> str:
    """Is there a recording, and was it made by the code as it is now?"""
    file = folder / f"{_name(module)}.json"
    if not file.exists():
        return "not recorded"
    recording = json.loads(file.read_text())
    age = "current" if recording["code"] == code_hash(module) else "older than its code"
    return f"{age}, {recording['date']} on {recording['device']}"


def record(module: str, run: Run) -> bool:
    """Measure what is not yet measured of a part, within the limit of time.

    Args:
        module: the part's full name, as it is imported.
        run: where and how.

    Returns:
        Whether the recording is complete. If not, the next run goes on where this one ended.
    """
    begin, part, name = time.monotonic(), importlib.import_module(module), _name(module)
    run.folder.mkdir(parents=True, exist_ok=True)
    partial = run.folder / f"{name}.partial.jsonl"
    origin = {"code": code_hash(module), "dry_run": run.tiny, **machine(run.device)}
    if not partial.exists() or json.loads(partial.read_text().splitlines()[0]) != origin:
        partial.write_text(json.dumps(origin) + "\n")  # made by other code or elsewhere: begin anew

    while left := missing(part, partial, run.tiny):
        print(f"{name}: {len(read(partial))} settings measured, next {json.dumps(left[0])}", flush=True)
        variables = environment(part, left[0])
        arguments = [run.device, module, str(partial), *["tiny"] * run.tiny]
        try:
            worker = _worker(arguments, timeout=run.limit_s - (time.monotonic() - begin), variables=variables)
        except subprocess.TimeoutExpired:
            print(f"{name}: not complete after {run.limit_s:g} s; the same command goes on from here")
            return False
        if worker.returncode:
            # what has killed the process would kill it again: that is the result of the setting it was at
            at = next(s for s in missing(part, partial, run.tiny) if environment(part, s) == variables)
            write(partial, at, {"error": f"the process ended with code {worker.returncode}"})

    done = read(partial)
    failed = [(setting, result["error"]) for setting, result in done if "error" in result]
    recording = {
        "part": name,
        "question": question(module),
        **origin,
        "date": datetime.date.today().isoformat(),
        "commit": run.commit,
        "command": run.command,
        "group": part.GROUP,
        "results": part.summarize([pair for pair in done if "error" not in pair[1]]),
        "settings": [{"setting": setting, "result": result} for setting, result in done],
    }
    file = run.folder / f"{name}.json"
    file.write_text(json.dumps(recording, indent=1) + "\n")
    partial.unlink()
    for setting, error in failed:
        print(f"{name}: {json.dumps(setting)} failed: {error}")
    print(f"{name}: {len(done) - len(failed)} of {len(done)} settings are in {file}")
    return True


def _name(module: str) -> str:
    return module.rpartition(".")[2]


def _worker(
    arguments: list[str], *, timeout: float, variables: Mapping[str, str]
) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu_parts.worker", *arguments],
        stdin=subprocess.DEVNULL,
        timeout=max(timeout, 0.0),
        cwd=ROOT,
        env={**os.environ, **variables},
    )
