"""Which checkpoints are there, and is each what was saved? A checkpoint is a directory with a manifest.

A checkpoint is committed by giving its directory its final name, when all its files and then its manifest are
on disk. The names begin with the number of the commit: the latest checkpoint is the one with the highest, and
there is no pointer that could point elsewhere. What is being saved or deleted has a name that begins with a
dot.
"""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fsdp_utils.checkpoint.errors import CheckpointError

MANIFEST = "manifest.json"
FORMAT = 1
_NAME = re.compile(r"(\d{6,})-step-(\d+)")
_BLOCK = 1 << 17  # bytes read at a time; few enough to stay in the processor's cache

Progress = Callable[[int], None]  # is told of each piece of work, in bytes


class Committed(NamedTuple):
    commit: int
    step: int
    path: Path


def committed(directory: Path) -> list[Committed]:
    """The checkpoints in that directory, in the order in which they were saved."""
    if not directory.is_dir():
        return []
    found = [(_NAME.fullmatch(path.name), path) for path in directory.iterdir()]
    return sorted(Committed(int(match[1]), int(match[2]), path) for match, path in found if match)


def find(directory: Path, step: int | str) -> Path:
    """The checkpoint of that step, or the one saved last for "latest".

    Raises:
        CheckpointError: there is none; names the steps that are there.
    """
    there = committed(directory)
    for one in reversed(there):
        if step in ("latest", one.step):
            return one.path
    steps = ", ".join(str(one.step) for one in there[-10:])
    raise CheckpointError(
        f"{directory}: expected a checkpoint of step {step!r}, found "
        + (f"those of steps {steps}" if there else "none" if directory.is_dir() else "no such directory")
    )


# ---- the manifest ----------------------------------------------------------------------------------


def write_manifest(directory: Path, content: dict[str, Any]) -> None:
    """Write it durably, with a hash of its own."""
    text = json.dumps(content, sort_keys=True)
    with (directory / MANIFEST).open("w") as file:
        # One line for each part: it can be read with `head` and compared with `diff`.
        lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in content.items()]
        file.write("{\n" + ",\n".join([*lines, f'"sha256": "{_sha256(text)}"']) + "\n}\n")
        file.flush()
        os.fsync(file.fileno())
    sync_directory(directory)


def read_manifest(checkpoint: Path) -> dict[str, Any]:
    """The manifest of a checkpoint.

    Raises:
        CheckpointError: it is missing or damaged.
    """
    path = checkpoint / MANIFEST
    try:
        content = json.loads(path.read_text())
        expected = content.pop("sha256")
        found = _sha256(json.dumps(content, sort_keys=True))
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: expected the manifest of a checkpoint, found no file") from error
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise CheckpointError(
            f"{path}: expected the manifest of a checkpoint, found a damaged one: {type(error).__name__}: "
            f"{error}"
        ) from error
    if found != expected:
        raise CheckpointError(f"{path}: expected a manifest with SHA-256 {expected}, found {found}")
    if content["format"] != FORMAT:
        raise CheckpointError(f"{path}: expected format {FORMAT}, found {content['format']}")
    return content


def tensor_specs(manifest: dict[str, Any]) -> dict[str, tuple[torch.dtype, torch.Size]]:
    """dtype and shape of every tensor by flat name; a tied one under each of its names."""
    specs = {
        key: (getattr(torch, entry["dtype"]), torch.Size(entry["shape"]))
        for key, entry in manifest["tensors"].items()
    }
    return specs | {f"model.{alias}": specs[f"model.{name}"] for alias, name in manifest["tied"].items()}


# ---- verifying -------------------------------------------------------------------------------------


def check_sizes(checkpoint: Path, manifest: dict[str, Any]) -> None:
    """Is every file there, and as long as it was?"""
    for name, entry in manifest["files"].items():
        path = checkpoint / name
        try:
            found = path.stat().st_size
        except OSError as error:
            raise CheckpointError(
                f"{path}: expected a file of {entry['bytes']} bytes, found none ({error.strerror})"
            ) from error
        if found != entry["bytes"]:
            raise CheckpointError(f"{path}: expected {entry['bytes']} bytes, found {found}")


def check_hashes(
    checkpoint: Path,
    manifest: dict[str, Any],
    names: Iterable[str],
    *,
    threads: int = 1,
    progress: Progress = lambda count: None,
) -> None:
    """Is what those files hold what was written to them?"""

    def check(name: str) -> None:
        path, expected = checkpoint / name, manifest["files"][name]["sha256"]
        found = hash_file(path, progress=progress)
        if found != expected:
            raise CheckpointError(
                f"{path}: expected SHA-256 {expected}, found {found}: it is not what was saved (a damaged "
                "disk or "
                "copy, or a file of another checkpoint)"
            )

    with ThreadPoolExecutor(threads) as pool:
        for _ in pool.map(check, names):
            pass


def hash_file(
    path: Path, *, length: int | None = None, end: bytes = b"", progress: Progress = lambda count: None
) -> str:
    """SHA-256 of a file, or of its first `length` bytes and `end`."""
    sha256, block = hashlib.sha256(), memoryview(bytearray(_BLOCK))
    left = path.stat().st_size if length is None else length
    with path.open("rb", buffering=0) as file:
        while left and (count := file.readinto(block[: min(left, _BLOCK)])):
            sha256.update(block[:count])
            progress(count)
            left -= count
    sha256.update(end)
    return sha256.hexdigest()


def share(files: dict[str, dict[str, Any]], rank: int, world_size: int) -> list[str]:
    """The files that this rank is to read, such that all ranks read about as much."""
    loads = [0] * world_size
    mine = []
    for name in sorted(files, key=lambda name: (-files[name]["bytes"], name)):
        reader = loads.index(min(loads))
        loads[reader] += files[name]["bytes"]
        if reader == rank:
            mine.append(name)
    return mine


# ---- committing and deleting -----------------------------------------------------------------------


def begin(directory: Path, step: int) -> tuple[Path, Path]:
    """A new directory to save into, and the name that will commit it."""
    directory.mkdir(parents=True, exist_ok=True)
    for leftover in directory.glob(".*-step-*"):  # of saves and deletions that were cut short
        if leftover.name.startswith((".saving-", ".deleting-")):
            shutil.rmtree(leftover, ignore_errors=True)
    commit = max((one.commit for one in committed(directory)), default=0) + 1
    name = f"{commit:06d}-step-{step}"
    unfinished = directory / f".saving-{os.urandom(4).hex()}-{name}"
    unfinished.mkdir()
    return unfinished, directory / name


def commit(unfinished: Path, final: Path) -> None:
    """From here on it is the latest, whatever happens to the machine."""
    unfinished.rename(final)
    sync_directory(final.parent)


def keep_last(directory: Path, count: int) -> None:
    """Delete all but the last checkpoints. One that is half deleted no longer has its name."""
    for one in committed(directory)[:-count]:
        doomed = one.path.with_name(f".deleting-{one.path.name}")
        one.path.rename(doomed)
        sync_directory(directory)
        shutil.rmtree(doomed)


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable. (Windows has no such call, and does not need it.)"""
    if os.name == "nt":
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
