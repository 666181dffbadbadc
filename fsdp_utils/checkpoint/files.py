"""Read, write, hash and lock files that other programs may be using too."""

import io
import json
import os
import re
import socket
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from blake3 import blake3
from filelock import FileLock, Timeout

from fsdp_utils.checkpoint.errors import CheckpointDamagedError, CheckpointError

# Bytes that are written or read and then hashed: few enough to stay in the processor's cache in between.
_BLOCK = 1 << 20
_SYNC_BYTES = 1 << 26  # after so many the disk begins to write
_ADVICE: int | None = getattr(os, "POSIX_FADV_DONTNEED", None)  # Linux has it, macOS has not
# URLs, also with the one slash that Path leaves of two. "run:1" and "C:/run" are paths.
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:[:/]|.*://", re.DOTALL)


def local_path(path: str | os.PathLike[str]) -> Path:
    """Return the absolute path of a file or directory of a file system that is mounted here."""
    text = os.fspath(path) if isinstance(path, os.PathLike) else path
    if not isinstance(text, str) or not text or text.startswith("~") or _URL.match(text) or "\0" in text:
        raise CheckpointError(
            f"expected the path of a directory that is mounted here, as text or a Path, found {path!r}. Pass "
            "~ through os.path.expanduser; in place of a URL, save to a folder here, and upload the one that "
            "save_distributed(...).wait() returns"
        )
    return Path(text).absolute()


@contextmanager
def doing(what: str, path: Path) -> Iterator[None]:
    """Turn an OSError into a CheckpointError: expected to be able to do something with a path."""
    try:
        yield
    except OSError as error:
        absent = what == "read" and isinstance(error, FileNotFoundError | IsADirectoryError)
        kind = CheckpointDamagedError if absent else CheckpointError
        name = "it" if str(error.filename or path) == str(path) else error.filename
        raise kind(
            f"{path}: expected to be able to {what} {name}, found {error.strerror or error}"
        ) from error


# ---- reading -----------------------------------------------------------------------------------------


def open_file(path: Path) -> io.FileIO:
    """Open a file for reading, without a buffer."""
    with doing("read", path):
        return io.FileIO(path)


def fill(target: memoryview, file: io.FileIO, begin: int, path: Path) -> None:
    """Read the bytes of an open file from `begin` on, until the target is full."""
    with doing("read", path):
        file.seek(begin)
        while target:
            count = file.readinto(target)
            if not count:
                raise CheckpointDamagedError(
                    f"{path}: expected {len(target)} bytes more, found the end of the file"
                )
            target = target[count:]


def hash_file(path: Path, threads: int) -> str:
    """Return the BLAKE3 of a file, as hex digits."""
    hashed, block = blake3(max_threads=threads), memoryview(bytearray(_BLOCK))
    with open_file(path) as file, doing("read", path):
        while count := file.readinto(block):
            hashed.update(block[:count])
    return hashed.hexdigest()


def read_json(path: Path) -> Any:
    """Read a JSON file."""
    with open_file(path) as file, doing("read", path):
        content = file.readall()
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise CheckpointDamagedError(f"{path}: expected JSON, found {error!s:.300}") from error


# ---- writing -----------------------------------------------------------------------------------------


def write_file(path: Path, pieces: Iterable[memoryview | bytes]) -> dict[str, Any]:
    """Write a new file durably, and return {"bytes": length, "blake3": hex digits}."""
    hashed, length, begun = blake3(), 0, 0
    with doing("write", path), path.open("xb", buffering=0) as file:
        for piece in pieces:
            left = memoryview(piece).cast("B")
            while left:
                count = file.write(left[:_BLOCK])
                hashed.update(left[:count])
                length += count
                left = left[count:]
                if length - begun >= _SYNC_BYTES and _ADVICE is not None:
                    # The disk begins to write, while the processor hashes on.
                    os.posix_fadvise(file.fileno(), begun, length - begun, _ADVICE)
                    begun = length
        os.fsync(file.fileno())
    return {"bytes": length, "blake3": hashed.hexdigest()}


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def locked(path: Path, *, wait_s: float) -> Iterator[bool]:
    """Keep other programs out until the context or this process ends; gives whether they are.

    The lock holds between hosts too, where the shared file system has locks (NFS and Lustre as most are
    mounted). Forks do not hold it.
    """
    lock = FileLock(path, timeout=wait_s, thread_local=False)  # a thread may end the context
    try:
        lock.acquire()
        now = time.strftime("%Y-%m-%d %H:%M:%S")
        path.write_text(f"process {os.getpid()} on {socket.gethostname()}, since {now}")
    except Timeout as error:
        owner = path.read_text(errors="replace")[:200] if path.exists() else ""
        raise CheckpointError(
            f"{path.parent}: expected to be the only program that saves there, found "
            f"{owner or 'another program'}, which is saving now. Give each training a directory of its own"
        ) from error
    except OSError:  # the file system has no locks, or is full: the lock holds without its owner's name
        pass
    try:
        yield lock.is_locked
    finally:
        with suppress(OSError):
            path.unlink()
        lock.release()
