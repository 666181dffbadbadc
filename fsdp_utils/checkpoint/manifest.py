"""Checkpoint directories: find them, and verify their files. Each has a manifest.

Their names begin with the number of the commit, so the latest checkpoint is the one with the highest number,
and no pointer can be wrong.
"""

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
from blake3 import blake3

from fsdp_utils.checkpoint.errors import CheckpointDamagedError, CheckpointError, CheckpointNotFoundError
from fsdp_utils.checkpoint.files import is_plain_name, open_regular, read_regular, size_of, sync_directory
from fsdp_utils.checkpoint.remote import is_remote, located, refreshed

MANIFEST = "manifest.json"
DESCRIPTION = ".metadata"
FORMAT = 1
# By the name under which a hash stands in a manifest. Older checkpoints have SHA-256, which takes longer.
ALGORITHMS = {"blake3": blake3, "sha256": hashlib.sha256}
ALGORITHM = "blake3"  # of what is written
KNOWN = " or ".join(ALGORITHMS)
_MOST_BYTES = 1 << 25  # of a manifest; that of 100,000 tensors has half of it
_ENTRIES: dict[str, tuple[type, ...]] = {
    "step": (int,),
    "saved_at": (str,),
    "world_size": (int,),
    "torch": (str,),
    "optimizer": (str, type(None)),
    "tied": (dict,),
    "model": (str,),
    "config": (dict, type(None)),
    "files": (dict,),
    "tensors": (dict,),
}
_DTYPES = {name for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
NAME = re.compile(r"(\d{6,})-step-(\d+)")
_BLOCK = 1 << 17  # bytes read at a time; few enough to stay in the processor's cache

Progress = Callable[[int], None]  # is told of each piece of work, in bytes


class Committed(NamedTuple):
    commit: int
    step: int
    path: Path


def committed(directory: Path) -> list[Committed]:
    """List the committed checkpoints in the order in which they were saved."""
    if not refreshed(directory).is_dir():
        return []
    found = [(NAME.fullmatch(path.name), path) for path in directory.iterdir() if is_committed(path)]
    return sorted(Committed(int(match[1]), int(match[2]), path) for match, path in found if match)


def is_committed(path: Path) -> bool:
    """Whether all of it is there: behind a URL the manifest says so, which is written last."""
    return not is_remote(path) or (path / MANIFEST).exists()


def checkpoints(directory: str | os.PathLike[str]) -> dict[int, Path]:
    """Map the step of each checkpoint in a directory to its path, in the order in which they were saved.

    Looks at the directory as this process sees it, and waits for no other rank. Checkpoints that are still
    being saved are not there yet. Of a step that was saved twice it gives the later one.

    Args:
        directory: as for save_distributed.

    Returns:
        {} where there is no checkpoint, or no directory.

    Example::

        for step, path in checkpoints("run").items():
            verify_checkpoint(path)
    """
    found: dict[int, Path] = {}
    for one in committed(located(directory).absolute()):
        found.pop(one.step, None)
        found[one.step] = one.path
    return found


def latest_step(directory: str | os.PathLike[str]) -> int | None:
    """Return the step of the checkpoint that was saved last, None where there is none.

    Looks at the directory as this process sees it, and waits for no other rank.

    Args:
        directory: as for save_distributed.

    Example::

        if latest_step("run") is not None:
            load_distributed("run", model, optimizer)
    """
    return next(reversed(checkpoints(directory)), None)


def find(directory: Path, step: int | str) -> Path:
    """Find the checkpoint of a step, or the one saved last for "latest".

    Raises:
        CheckpointError: there is none; names the steps that are there.
    """
    there = committed(directory)
    for one in reversed(there):
        if step in ("latest", one.step):
            return one.path
    steps = ", ".join(str(one.step) for one in there[-10:])
    raise CheckpointNotFoundError(
        f"{directory}: expected a checkpoint of step {step!r}, found "
        + (f"those of steps {steps}" if there else "none" if directory.is_dir() else "no such directory")
    )


# ---- the manifest ----------------------------------------------------------------------------------


def write_manifest(directory: Path, content: dict[str, Any]) -> None:
    """Write the manifest durably, with its own hash."""
    text = json.dumps(content, sort_keys=True)
    # One line for each part: it can be read with `head` and compared with `diff`.
    lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in content.items()]
    whole = "{\n" + ",\n".join([*lines, f'"{ALGORITHM}": "{_hash(text)}"']) + "\n}\n"
    if len(whole) > _MOST_BYTES:
        raise CheckpointError(
            f"{directory / MANIFEST}: expected a manifest of at most {_MOST_BYTES} bytes, found "
            f"{len(whole)}, for {len(content['tensors'])} tensors in {len(content['files'])} files"
        )
    if is_remote(directory):
        (directory / MANIFEST).write_text(whole)
        return
    with (directory / MANIFEST).open("w") as file:
        file.write(whole)
        file.flush()
        os.fsync(file.fileno())
    sync_directory(directory)


def read_manifest(checkpoint: Path) -> dict[str, Any]:
    """Read and check the manifest of a checkpoint.

    Raises:
        CheckpointError: it is missing or damaged.
    """
    path = checkpoint / MANIFEST
    try:
        content = json.loads(read_regular(path, at_most=_MOST_BYTES))
        if (algorithm := algorithm_of(content)) is None:
            raise CheckpointDamagedError(
                f"{path}: expected the manifest of a checkpoint with its hash, by {KNOWN}, found none: it is "
                "damaged, or of a later version of fsdp_utils"
            )
        expected = content.pop(algorithm)
        found = _hash(json.dumps(content, sort_keys=True), algorithm)
    except FileNotFoundError as error:
        raise CheckpointDamagedError(
            f"{path}: expected the manifest of a checkpoint, found no file"
        ) from error
    except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise CheckpointDamagedError(
            f"{path}: expected the manifest of a checkpoint, found a damaged one: {type(error).__name__}: "
            f"{error}"
        ) from error
    if found != expected:
        raise CheckpointDamagedError(
            f"{path}: expected a manifest with {algorithm} {expected}, found {found}"
        )
    if content.get("format") != FORMAT:
        raise CheckpointError(f"{path}: expected format {FORMAT}, found {content.get('format')!r}")
    if problem := _problem(content):
        raise CheckpointDamagedError(f"{path}: expected the manifest of a checkpoint, found {problem}")
    return content


def _problem(content: dict[str, Any]) -> str:
    """Say which entry of a manifest is not of the expected type. (A forged manifest has a right hash.)"""
    for name, kinds in _ENTRIES.items():
        if name not in content or type(content[name]) not in kinds:
            found = f"{content[name]!r:.80}" if name in content else "nothing"
            return f"{found} under {name!r}"
    if content["step"] < 0 or content["world_size"] < 1:
        return f"step {content['step']} of {content['world_size']} ranks"
    for name, entry in content["files"].items():
        if not is_plain_name(name) or name == MANIFEST:
            return f"a file {name!r:.200}, which is not inside of the checkpoint"
        if not _is(entry, {"bytes": int}) or entry["bytes"] < 0:
            return f"{entry!r:.200} for the file {name!r:.200}"
        if algorithm_of(entry) is None:
            return f"no hash by {KNOWN} in {entry!r:.200} for the file {name!r:.200}"
    for name, entry in content["tensors"].items():
        if not _is(entry, {"dtype": str, "shape": list}) or entry["dtype"] not in _DTYPES:
            return f"{entry!r:.200} for the tensor {name!r:.200}"
        if not all(type(size) is int and 0 <= size < 2**63 for size in entry["shape"]):
            return f"the shape {entry['shape']!r:.200} for the tensor {name!r:.200}"
    for alias, name in content["tied"].items():
        if f"model.{name}" not in content["tensors"]:
            return f"{alias!r:.200} tied to {name!r:.200}, which is no tensor of it"
    return ""


def algorithm_of(entry: Any) -> str | None:
    """Name the algorithm of the hash in an entry of a manifest; None if it has none that is known, or two."""
    names = [name for name in ALGORITHMS if type(entry) is dict and name in entry]
    return names[0] if len(names) == 1 and type(entry[names[0]]) is str else None


def _is(entry: Any, kinds: dict[str, type]) -> bool:
    return type(entry) is dict and all(type(entry.get(name)) is kind for name, kind in kinds.items())


def tensor_specs(manifest: dict[str, Any]) -> dict[str, tuple[torch.dtype, torch.Size]]:
    """dtype and shape of every tensor by flat name; a tied one under each of its names."""
    specs = {
        key: (getattr(torch, entry["dtype"]), torch.Size(entry["shape"]))
        for key, entry in manifest["tensors"].items()
    }
    return specs | {f"model.{alias}": specs[f"model.{name}"] for alias, name in manifest["tied"].items()}


# ---- verifying -------------------------------------------------------------------------------------


def check_sizes(checkpoint: Path, manifest: dict[str, Any]) -> None:
    """Check that every file is there, with the size that it had."""
    for name, entry in manifest["files"].items():
        path = checkpoint / name
        try:
            with open_regular(path) as file:
                found = size_of(file)
        except OSError as error:
            raise CheckpointDamagedError(
                f"{path}: expected a file of {entry['bytes']} bytes, found none ({error.strerror})"
            ) from error
        if found != entry["bytes"]:
            raise CheckpointDamagedError(f"{path}: expected {entry['bytes']} bytes, found {found}")


def check_hashes(
    checkpoint: Path,
    manifest: dict[str, Any],
    names: Iterable[str],
    *,
    threads: int = 1,
    progress: Progress = lambda count: None,
) -> None:
    """Check the hashes of those files."""

    def check(name: str) -> None:
        path, entry = checkpoint / name, manifest["files"][name]
        algorithm = algorithm_of(entry)
        assert algorithm is not None  # read_manifest() refuses such an entry
        expected = entry[algorithm]
        try:
            found = hash_file(path, algorithm, progress=progress)
        except OSError as error:
            raise CheckpointDamagedError(
                f"{path}: expected a file that can be read, found {error.strerror} (did another program "
                "delete the checkpoint?)"
            ) from error
        if found != expected:
            raise CheckpointDamagedError(
                f"{path}: expected {algorithm} {expected}, found {found}: it is not what was saved (a "
                "damaged disk or copy, or a file of another checkpoint)"
            )

    with ThreadPoolExecutor(threads) as pool:
        for _ in pool.map(check, names):
            pass


def hash_file(
    path: Path,
    algorithm: str = ALGORITHM,
    *,
    length: int | None = None,
    end: bytes = b"",
    progress: Progress = lambda count: None,
) -> str:
    """Hash a file, or its first `length` bytes and `end`."""
    hashed, block = ALGORITHMS[algorithm](), memoryview(bytearray(_BLOCK))
    with open_regular(path) as file:
        left = size_of(file) if length is None else length
        while left and (count := file.readinto(block[: min(left, _BLOCK)])):
            hashed.update(block[:count])
            progress(count)
            left -= count
    hashed.update(end)
    return hashed.hexdigest()


def share(files: dict[str, dict[str, Any]], rank: int, world_size: int) -> list[str]:
    """Choose the files that this rank hashes, such that all ranks hash about as many bytes.

    Rank 0 has the description, which it reads for all ranks.
    """
    loads = [0] * world_size
    mine = []
    for name in sorted(files, key=lambda name: (name != DESCRIPTION, -files[name]["bytes"], name)):
        reader = loads.index(min(loads))
        loads[reader] += files[name]["bytes"]
        if reader == rank:
            mine.append(name)
    return mine


def _hash(text: str, algorithm: str = ALGORITHM) -> str:
    return ALGORITHMS[algorithm](text.encode()).hexdigest()
