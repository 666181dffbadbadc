"""Folders of checkpoints: begin, commit, list, find, verify and delete them.

A checkpoint is committed by renaming its folder, when all its files and then its manifest are on disk.
Folders that are being saved or deleted have names that begin with a dot, and a lock keeps other programs out.
The others begin with the number of the commit, so the latest checkpoint is the one with the highest number,
and no pointer can be wrong.
"""

import json
import os
import re
import shutil
import time
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from blake3 import blake3

from fsdp_utils.checkpoint.errors import CheckpointDamagedError, CheckpointError, CheckpointNotFoundError
from fsdp_utils.checkpoint.files import (
    doing,
    hash_file,
    local_path,
    locked,
    read_json,
    sync_directory,
    write_file,
)

MANIFEST = "manifest.json"
FORMAT = 4
_LOCK, _SAVING, _DELETING = ".saving-lock", ".saving-", ".deleting-"
_NAME = re.compile(r"(\d{6,})-step-(\d+)")
_LOCK_WAIT_S = 10.0  # for a program before this one that is about to end
_SHARED_WAIT_S = 3.0  # a shared directory may show another host's new folder a little late


def _committed(directory: Path) -> list[tuple[int, int, Path]]:
    """List number, step and path of the committed checkpoints in the order in which they were saved.

    A listing that fails is an error: taken for an empty one, the next save would begin again at commit 1.
    """
    with doing("list", directory):
        try:
            paths = list(directory.iterdir())
        except FileNotFoundError:
            return []
    found = [(_NAME.fullmatch(path.name), path) for path in paths]
    return sorted((int(match[1]), int(match[2]), path) for match, path in found if match)


def checkpoints(directory: str | os.PathLike[str]) -> dict[int, Path]:
    """Map the step of each checkpoint in a directory to its path, in the order in which they were saved.

    Looks at the directory as this process sees it, and waits for no other rank. Checkpoints that are still
    being saved are not there yet. Of a step that was saved twice it gives the later one.

    Args:
        directory: as for save_distributed.

    Returns:
        {} where there is no checkpoint, or no directory.

    Raises:
        CheckpointError: the directory cannot be listed, or is a URL.

    Example::

        for step, path in checkpoints("run").items():
            verify_checkpoint(path)
    """
    found: dict[int, Path] = {}
    for _, step, path in _committed(local_path(directory)):
        found.pop(step, None)
        found[step] = path
    return found


def find(directory: str | os.PathLike[str], step: int | str = "latest") -> Path:
    """Find the checkpoint of a step, or the one saved last; a checkpoint's own path is the latest."""
    home = local_path(directory)
    is_one = os.path.lexists(home / MANIFEST) or (_NAME.fullmatch(home.name) and home.is_dir())
    if step == "latest" and is_one:
        return home
    there = checkpoints(home)
    wanted = [*there][-1] if there and step == "latest" else step
    if wanted in there:
        return there[wanted]
    steps = ", ".join(map(str, [*there][-10:]))
    raise CheckpointNotFoundError(
        f"{home}: expected a checkpoint of step {step!r}, found "
        + (f"those of steps {steps}" if there else "none" if home.is_dir() else "no such directory")
    )


def every(directory: str | os.PathLike[str]) -> list[Path]:
    """List all checkpoints in a directory, also two of one step; or the path itself, if it is one."""
    home = local_path(directory)
    return [home] if find(home) == home else [path for *_, path in _committed(home)]


# ---- saving ------------------------------------------------------------------------------------------


class Unfinished(ExitStack):
    """A folder that is being written, alone in its directory, and deleted unless it is committed."""

    def __init__(self, home: Path, step: int) -> None:
        super().__init__()
        self._home, self._step = home, step

    def begin(self) -> tuple[Path, Path]:
        """Make the folder, and choose the name that will commit it."""
        home = self._home
        if os.path.lexists(home / MANIFEST):
            raise CheckpointError(
                f"{home}: expected a directory to write into, found a checkpoint, which another file would "
                f"damage. Give the directory that it is in, {home.parent}, or another one"
            )
        with doing("create", home):
            for path in reversed([path for path in (home, *home.parents) if not path.is_dir()]):
                path.mkdir(exist_ok=True)
                sync_directory(path.parent)
        with doing("write", home):
            if self.enter_context(locked(home / _LOCK, wait_s=_LOCK_WAIT_S)):
                for left in [*home.glob(f"{_SAVING}*-step-*"), *home.glob(f"{_DELETING}*-step-*")]:
                    shutil.rmtree(left, ignore_errors=True)  # of saves and deletions that were cut short
            number = max((number for number, *_ in _committed(home)), default=0) + 1
            name = f"{number:06d}-step-{self._step}"
            self._path, self._final = home / f"{_SAVING}{os.urandom(4).hex()}-{name}", home / name
            self._path.mkdir()
            self.callback(shutil.rmtree, self._path, ignore_errors=True)
        return self._path, self._final

    def commit(self, manifest: dict[str, Any], keep: int | None) -> None:
        """Write the manifest, and make the folder the latest of `keep` checkpoints, durably."""
        content = {"format": FORMAT, **manifest}
        text = json.dumps({**content, "blake3": _hash(content)})
        write_file(self._path / MANIFEST, [text.encode()])
        with doing("write", self._final):
            sync_directory(self._path)
            self._path.rename(self._final)
            sync_directory(self._home)
        for *_, path in _committed(self._home)[:-keep] if keep else ():
            doomed = self._home / f"{_DELETING}{path.name}"
            with doing("delete", path):  # renamed first, so that none is found half deleted
                path.rename(doomed)
                sync_directory(self._home)
                doomed.unlink() if doomed.is_symlink() else shutil.rmtree(doomed)


# ---- verifying ---------------------------------------------------------------------------------------


def check_shared(checkpoint: Path) -> None:
    """Check that this rank sees the folder that another one has found or made, perhaps a moment ago."""
    limit = time.monotonic() + _SHARED_WAIT_S
    while not checkpoint.is_dir():
        if time.monotonic() > limit:
            raise CheckpointError(
                f"{checkpoint}: expected a directory that all ranks see, found none: it was deleted, or is "
                "not shared between the hosts. Use a file system that all of them mount"
            )
        time.sleep(0.1)


def _hash(content: Any) -> str:
    return blake3(json.dumps(content, sort_keys=True).encode()).hexdigest()


def read_manifest(checkpoint: Path) -> dict[str, Any]:
    """Read the manifest of a checkpoint, and compare it with its "blake3"."""
    check_shared(checkpoint)
    path = checkpoint / MANIFEST
    content = read_json(path)
    expected = content.pop("blake3", None) if isinstance(content, dict) else None
    if (found := _hash(content)) != expected:
        raise CheckpointDamagedError(
            f"{path}: expected a manifest with blake3 {expected!s:.80}, found {found}"
        )
    if (found := content["format"]) != FORMAT:
        raise CheckpointError(f"{path}: expected format {FORMAT}, found {found!r:.80}")
    return {**content, "blake3": expected}


def verify_checkpoint(path: str | os.PathLike[str]) -> None:
    """Verify that every byte is what was saved. Call it on one rank, or use the command line.

    Args:
        path: a checkpoint of save_distributed, or a directory of such checkpoints, of which all are verified.

    Raises:
        CheckpointError: names the file, what was expected and what was found.

    Example::

        verify_checkpoint("run")  # all checkpoints in the directory
    """
    for checkpoint in every(path):
        manifest = read_manifest(checkpoint)
        check_files(checkpoint, manifest, manifest["files"], threads=os.cpu_count() or 1)


def check_files(
    checkpoint: Path, manifest: Mapping[str, Any], names: Collection[str], *, threads: int = 1
) -> None:
    """Compare all names and sizes, and the hashes of the files named, with a checkpoint's manifest."""
    files = manifest["files"]
    sizes = {name: f"{entry['bytes']} bytes" for name, entry in files.items()}
    with doing("read", checkpoint):
        there = {one.name: f"{one.stat().st_size} bytes" for one in checkpoint.iterdir()}
    for name in sorted(sizes.keys() | there.keys() - {MANIFEST}):
        expected, found = (some.get(name, "no file of that name") for some in (sizes, there))
        if found != expected:
            raise CheckpointDamagedError(f"{checkpoint / name}: expected {expected}, found {found}")

    def check(name: str) -> None:
        if (found := hash_file(checkpoint / name, max(1, threads // len(names)))) != files[name]["blake3"]:
            raise CheckpointDamagedError(
                f"{checkpoint / name}: expected blake3 {files[name]['blake3']}, found {found}: it is not "
                "what was saved (a damaged disk or copy, or a file of another checkpoint)"
            )

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(check, names))  # raises the first error
