"""Begin, commit and delete checkpoints, such that each is there as a whole or not at all.

On a file system a checkpoint is committed by renaming its directory, when all its files and then its manifest
are on disk. Directories that are being saved or deleted have names that begin with a dot, and a lock keeps
other programs out.

Behind a URL there is neither a rename nor a lock. Files are written under their final names, and the manifest
last: a directory without one is no checkpoint yet. Deleting begins with the manifest.
"""

import os
import shutil
import time
from pathlib import Path

from fsdp_utils.checkpoint.errors import CheckpointError
from fsdp_utils.checkpoint.files import ABANDONED_S, PREFIX, Lock, LockTaken, sync_directory
from fsdp_utils.checkpoint.manifest import MANIFEST, NAME, committed
from fsdp_utils.checkpoint.remote import delete, is_remote, refreshed

LOCK = ".saving-lock"
_BEGUN = ".begun"  # behind a URL, where no directory is without a file
# For a program before this one that is about to end; its workers keep its lock for up to 5 s after its death.
_LOCK_WAIT_S = 10.0

# on the directories that this process saves into now; the other ranks hold none
_locks: dict[Path, Lock] = {}


def begin(directory: Path, step: int) -> tuple[Path, Path]:
    """Make a new directory to save into, and choose the name that will commit it.

    On a file system nobody else can save into the same directory until end() or abandon(), or until this
    process ends.

    Raises:
        CheckpointError: another program is saving there.
    """
    if is_remote(directory):
        return _begin_remote(directory, step)
    directory.mkdir(parents=True, exist_ok=True)
    end(directory)  # a save of this process that failed before anybody could abandon it
    try:
        lock = _locks[directory] = Lock(directory / LOCK, wait_s=_LOCK_WAIT_S)
    except LockTaken as error:
        raise CheckpointError(
            f"{directory}: expected to be the only program that saves there, found {error}, which is saving "
            "now. Give each training a directory of its own"
        ) from error
    for leftover in directory.glob(".*-step-*"):  # of saves and deletions that were cut short
        if leftover.name.startswith((PREFIX, ".deleting-")) and (lock.held or _is_old(leftover)):
            shutil.rmtree(leftover, ignore_errors=True)
    commit = max((one.commit for one in committed(directory)), default=0) + 1
    name = f"{commit:06d}-step-{step}"
    unfinished = directory / f"{PREFIX}{os.urandom(4).hex()}-{name}"
    unfinished.mkdir()
    return unfinished, directory / name


def _begin_remote(directory: Path, step: int) -> tuple[Path, Path]:
    commit = max((number for number, _ in _numbered(directory)), default=0) + 1
    path = directory / f"{commit:06d}-step-{step}"
    (path / _BEGUN).write_bytes(b"")
    return path, path


def has_begun(unfinished: Path) -> bool:
    """Whether this process sees what begin() has made."""
    return (refreshed(unfinished) / _BEGUN).exists() if is_remote(unfinished) else unfinished.is_dir()


def commit(unfinished: Path, final: Path) -> None:
    """Make the checkpoint the latest, durably. Its manifest has been written."""
    if is_remote(final):
        (final / _BEGUN).unlink()
        return
    unfinished.rename(final)
    sync_directory(final.parent)


def end(directory: Path) -> None:
    """Release the lock on the directory."""
    if (lock := _locks.pop(directory, None)) is not None:
        lock.release()


def abandon(unfinished: Path) -> None:
    """Delete what was not committed, and release the lock."""
    if is_remote(unfinished):
        if not (unfinished / MANIFEST).exists():
            delete(unfinished)
        return
    shutil.rmtree(unfinished, ignore_errors=True)
    end(unfinished.parent)


def _is_old(path: Path) -> bool:
    try:
        return time.time() - path.stat().st_mtime > ABANDONED_S
    except OSError:
        return False


def keep_last(directory: Path, count: int) -> None:
    """Delete all but the last checkpoints. Each is renamed first, so that none is found half deleted."""
    if is_remote(directory):
        _keep_last_remote(directory, count)
        return
    for one in committed(directory)[:-count]:
        doomed = one.path.with_name(f".deleting-{one.path.name}")
        one.path.rename(doomed)
        sync_directory(directory)
        shutil.rmtree(doomed)


def _keep_last_remote(directory: Path, count: int) -> None:
    """Delete what was begun before the last one and not ended, too: by saves that were cut short."""
    there = committed(directory)
    kept = {one.commit for one in there[-count:]}
    for number, path in _numbered(directory):
        if number not in kept and number < there[-1].commit:
            (path / MANIFEST).unlink(missing_ok=True)
            delete(path)


def _numbered(directory: Path) -> list[tuple[int, Path]]:
    """What has the name of a checkpoint, with its number, committed or not."""
    if not refreshed(directory).is_dir():
        return []
    found = [(NAME.fullmatch(path.name), path) for path in directory.iterdir()]
    return [(int(match[1]), path) for match, path in found if match]
