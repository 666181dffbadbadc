"""Check recordings that were made elsewhere, and put them where the lessons read them."""

import datetime
import importlib
import json
import math
import re
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.gpu_parts.recorder import RECORDED, ROOT, code_hash, failures
from benchmarks.machine import table

KEYS = {
    "part",
    "question",
    "code",
    "dry_run",
    "device",
    "device_memory_gib",
    "driver",
    "torch",
    "cuda",
    "python",
}
KEYS |= {"transformers", "date", "commit", "command", "group", "results", "settings"}
OLDEST = (2, 11)  # torch, as benchmarks/gpu.py says
LONGEST_S = 600.0  # no step takes as long


def place(folder: Path, modules: Mapping[str, str], recorded: Path = RECORDED) -> int:
    """Check the recordings in DIR (device, versions, commit, code, numbers); copy them to notebooks/recorded.

    Args:
        folder: where --out put the recordings.
        modules: by the name of a part, its module.
        recorded: where the lessons read them.

    Returns:
        The exit code: 1 where a recording was refused or is missing. Those that are good are placed anyway.
    """
    rows, refused = [], []
    for name, module in modules.items():
        file = folder / f"{name}.json"
        if not file.exists():
            begun = (folder / f"{name}.partial.jsonl").exists()
            rows.append([name, "MISSING, not complete: record it further" if begun else "MISSING"])
            continue
        problems, recording = check(file, module)
        if problems:
            rows.append([name, "REFUSED"])
            refused += [f"{name}: {problem}" for problem in problems]
            continue
        recorded.mkdir(parents=True, exist_ok=True)
        new = recorded / f".{name}.json.new"
        new.write_bytes(file.read_bytes())
        new.replace(recorded / f"{name}.json")
        count = len(failures(recording))
        rows.append(
            [name, "placed" + f", {count} of {len(recording['settings'])} settings failed" * bool(count)]
        )
    print(table(["part", "recording"], rows))
    print(*refused, sep="\n")
    return 0 if all(text.startswith("placed") for _, text in rows) else 1


def check(file: Path, module: str) -> tuple[list[str], dict[str, Any]]:
    """What is wrong with a recording, each in a sentence, and the recording."""
    infinite: list[str] = []
    try:
        recording = json.loads(file.read_text(encoding="utf-8"), parse_constant=infinite.append)
    except ValueError as error:
        return [f"{file} is no JSON: {error}"], {}
    if not isinstance(recording, dict) or not recording.keys() >= KEYS:
        lacks = sorted(KEYS - recording.keys()) if isinstance(recording, dict) else "everything"
        return [f"{file} is no recording of benchmarks/gpu.py: it lacks {lacks}"], {}
    if infinite:
        return [f"it holds numbers that are not finite: {', '.join(sorted(set(infinite)))}"], recording
    about = [*_origin_problems(recording, module), *_commit_problems(recording, module)]
    return about or [*_setting_problems(recording, module)], recording


def _origin_problems(recording: Mapping[str, Any], module: str) -> Iterator[str]:
    name = module.rpartition(".")[2]
    if recording["part"] != name:
        yield f"expected the part {name}, found {recording['part']}"
    if recording["dry_run"]:
        yield "expected a recording, found a dry run"
    if not (recording["cuda"] and recording["device_memory_gib"]):
        yield f"expected a CUDA GPU, found {recording['device']}"
    if _version(recording["torch"]) < OLDEST:
        yield f"expected torch {'.'.join(map(str, OLDEST))} or later, found {recording['torch']}"
    for package in ("python", "transformers"):
        if not re.match(r"\d+\.\d+", str(recording[package])):
            yield f"expected the version of {package}, found {recording[package]!r}"
    try:
        if datetime.date.fromisoformat(recording["date"]) > datetime.date.today():
            yield f"it is dated {recording['date']}, a day to come"
    except ValueError:
        yield f"expected a date, found {recording['date']!r}"


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", text)[:2])


def _commit_problems(recording: Mapping[str, Any], module: str) -> Iterator[str]:
    """The code that measured is the code as it is now, and the commit that is named holds it."""
    if recording["code"] != code_hash(module):
        yield "its code has changed since it was made: record it anew"
        return
    commit = re.fullmatch(r"([0-9a-f]{40})( with changes)?", str(recording["commit"]))
    if commit is None:
        yield f"expected a commit of 40 hexadecimal digits, found {recording['commit']!r}"
        return
    try:
        held = code_hash(module, lambda name: file_at(commit[1], name))
    except (OSError, subprocess.CalledProcessError):
        yield f"the commit {commit[1]} is not in this repository, or lacks the part's code"
        return
    if held != recording["code"]:
        yield f"the commit {commit[1]} holds other code than the one that was recorded"


def file_at(commit: str, name: str) -> bytes:
    """A file of the repository as it was at a commit."""
    show = ["git", "-C", str(ROOT), "show", f"{commit}:{name}"]
    return subprocess.run(show, capture_output=True, check=True).stdout


def _setting_problems(recording: Mapping[str, Any], module: str) -> Iterator[str]:
    """All settings are there, the results follow from them, and the numbers are possible ones."""
    part = importlib.import_module(module)
    done = [(entry["setting"], entry["result"]) for entry in recording["settings"]]
    measured = [setting for setting, _ in done]
    for setting in part.settings(False, done):
        if setting not in measured:
            yield f"the setting {json.dumps(setting)} is missing: record the part further"
    good = [(setting, result) for setting, result in done if "error" not in result]
    if not good:
        yield f"no setting could be measured: {'; '.join(failures(recording))}"
    elif json.loads(json.dumps(part.summarize(good))) != recording["results"]:
        yield "its results do not follow from its settings"
    for setting, result in good:
        for problem in implausible(result, recording["device_memory_gib"]):
            yield f"{json.dumps(setting)}: {problem}"


def implausible(value: Any, memory_gib: float, where: str = "") -> Iterator[str]:
    """The numbers of a result that no GPU can have measured."""
    if isinstance(value, list):
        for i, item in enumerate(value):
            yield from implausible(item, memory_gib, f"{where}[{i}]")
    if isinstance(value, float) and not math.isfinite(value):
        yield f"{where} is {value}"
    if not isinstance(value, dict):
        return
    if {"median", "quartiles", "raw"} <= value.keys():
        low, high = value["quartiles"]
        if not (value["raw"] and 0 < min(value["raw"]) <= low <= value["median"] <= high <= LONGEST_S):
            yield f"{where} is no spread of seconds: {value['quartiles']} about {value['median']}"
    if "peak_reserved_gib" in value and not where.startswith((".simulated", ".predicted")):
        allocated, reserved = (value[f"peak_{kind}_gib"] for kind in ("allocated", "reserved"))
        if not (allocated and reserved and 0 < allocated <= reserved <= memory_gib):
            yield f"{where} allocated {allocated} and reserved {reserved} of {memory_gib} GiB"
    mfu = value.get("mfu")
    if mfu is not None and not 0 < mfu < 1:
        yield f"{where} has an MFU of {mfu}"
    for key, item in value.items():
        yield from implausible(item, memory_gib, f"{where}.{key}")
