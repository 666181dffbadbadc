"""Has a part measured in processes of its own, and keeps the recording.

Results go to PART.partial.jsonl beside the recording as they come, so that an interrupted run goes on from
there. When all are there, the recording is written and the partial file removed. What the processes print
goes to PART.log, which stays if a setting failed.
"""

import datetime
import hashlib
import importlib
import json
import math
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_parts.worker import drop_cut_line, environment, missing, read, write

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
    ends: float = math.inf  # by time.monotonic(): what is not measured by then is left to the next call

    def __post_init__(self) -> None:
        if self.tiny and self.folder.resolve() == RECORDED:
            raise ValueError(f"a dry run is no recording: choose another folder than {RECORDED}")


def _now(name: str) -> bytes:
    return (ROOT / name).read_bytes()


def code_hash(module: str, read_file: Callable[[str], bytes] = _now) -> str:
    """Of the part's file and those that it names in USES: with another hash a recording is stale.

    Args:
        module: the part's full name, as it is imported.
        read_file: a file's content by its path in the repository; the files as they are now if not given.
    """
    digest = hashlib.sha256()
    for name in (module.replace(".", "/") + ".py", *importlib.import_module(module).USES):
        digest.update(read_file(name))
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


def recorded(module: str, run: Run) -> dict[str, Any] | None:
    """The recording that this run would make anew: of the same code, on the same machine, complete."""
    file = run.folder / f"{_name(module)}.json"
    if not file.exists():
        return None
    recording = json.loads(file.read_text())
    origin = _origin(module, run)
    return recording if {key: recording.get(key) for key in origin} == origin else None


def record(module: str, run: Run) -> dict[str, Any] | None:
    """Measure what is not yet measured of a part, within the limit of time.

    Args:
        module: the part's full name, as it is imported.
        run: where and how.

    Returns:
        The recording; None if it is not complete. The next run then goes on where this one ended.
    """
    part, name = importlib.import_module(module), _name(module)
    run.folder.mkdir(parents=True, exist_ok=True)
    partial, log = (run.folder / f"{name}{ending}" for ending in (".partial.jsonl", ".log"))
    origin = _origin(module, run)
    if not partial.exists() or _first_line(partial) != origin:
        _write(partial, json.dumps(origin) + "\n")  # made by other code or elsewhere: begin anew
        log.unlink(missing_ok=True)

    drop_cut_line(partial)
    while left := missing(part, partial, run.tiny):
        print(f"{name}: {len(read(partial))} settings measured, next {json.dumps(left[0])}", flush=True)
        variables = environment(part, left[0])
        arguments = [run.device, module, str(partial), *["tiny"] * run.tiny]
        try:
            worker = _worker(arguments, timeout=run.ends - time.monotonic(), variables=variables, log=log)
        except subprocess.TimeoutExpired:
            print(
                f"{name}: not complete, as the time is over; the same command goes on from here", flush=True
            )
            return None
        drop_cut_line(partial)
        if worker.returncode:
            # what has killed the process would kill it again: that is the result of the setting it was at
            at = next(s for s in missing(part, partial, run.tiny) if environment(part, s) == variables)
            write(partial, at, {"error": f"the process ended with code {worker.returncode}, see {log.name}"})

    done = read(partial)
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
    file, failed = run.folder / f"{name}.json", failures(recording)
    _write(file, json.dumps(recording, indent=1) + "\n")
    partial.unlink()
    if not failed:
        log.unlink(missing_ok=True)
    print(*[f"{name}: {failure}" for failure in failed], sep="\n", end="\n" * bool(failed))
    print(f"{name}: {len(done) - len(failed)} of {len(done)} settings are in {file}", flush=True)
    return recording


def failures(recording: Mapping[str, Any]) -> list[str]:
    """The settings of a recording that could not be measured, with the error of each."""
    return [
        f"{json.dumps(entry['setting'])} failed: {entry['result']['error']}"
        for entry in recording["settings"]
        if "error" in entry["result"]
    ]


def _origin(module: str, run: Run) -> dict[str, Any]:
    return {"code": code_hash(module), "dry_run": run.tiny, **machine(run.device)}


def _first_line(partial: Path) -> dict[str, Any] | None:
    text = partial.read_text()
    return json.loads(text.splitlines()[0]) if "\n" in text else None


def _write(file: Path, text: str) -> None:
    """Replace the file in one step: whatever ends the process, the file is the old one or the new one."""
    new = file.with_name(f".{file.name}.new")
    new.write_text(text)
    new.replace(file)


def _name(module: str) -> str:
    return module.rpartition(".")[2]


def _worker(
    arguments: list[str], *, timeout: float, variables: Mapping[str, str], log: Path
) -> subprocess.CompletedProcess[bytes]:
    with log.open("ab") as output:
        return subprocess.run(
            [sys.executable, "-m", "benchmarks.gpu_parts.worker", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            timeout=None if math.isinf(timeout) else max(timeout, 0.0),
            cwd=ROOT,
            env={**os.environ, **variables},
        )
