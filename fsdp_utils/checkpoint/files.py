"""Files that another program may have put there, or may be using too: read, write and lock them."""

import errno
import fcntl
import io
import json
import os
import re
import socket
import stat
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from blake3 import blake3

from fsdp_utils.checkpoint.errors import CheckpointDamagedError, CheckpointError

# Bytes that are read or written and then hashed: few enough to stay in the processor's cache in between.
_BLOCK = 1 << 17
_SYNC_BYTES = 1 << 26  # after so many the disk begins to write
_ADVICE: int | None = getattr(os, "POSIX_FADV_DONTNEED", None)  # Linux has it, macOS has not
_MOST_BYTES = 1 << 28  # of a JSON file; that of 100,000 tensors has 16 MB
# URLs, also with the one slash that Path leaves of two. "run:1" and "C:/run" are paths.
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:[:/]|.*://", re.DOTALL)


def local_path(path: str | os.PathLike[str]) -> Path:
    """Return the absolute path of a file or directory of a file system that is mounted here.

    Raises:
        CheckpointError: it is a URL, a Path that was made of one, or begins with ~.
    """
    text = os.fspath(path) if isinstance(path, os.PathLike) else path
    if not isinstance(text, str) or not text:
        raise CheckpointError(f"expected the path of a directory, as text or a Path, found {path!r}")
    if text.startswith("~"):
        raise CheckpointError(f"{text}: expected a path without ~. Pass it through os.path.expanduser")
    if _URL.match(text) or "\0" in text:
        raise CheckpointError(
            f"{text!r}: expected the path of a file system that is mounted here, found a URL, or a NUL "
            "character. Save to a local folder, and upload the one that save_distributed(...).wait() returns"
        )
    return Path(text).absolute()


def is_plain_name(name: object) -> bool:
    """Whether the name is that of a file in the directory itself."""
    if not isinstance(name, str) or name in ("", ".", ".."):
        return False
    return Path(name).name == name and name.isprintable()  # no NUL, and no half of a surrogate pair


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Turn an OSError about something that is being read into a CheckpointError."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"{error.filename or path}: expected to be able to read it, found {error.strerror or error} (did "
            "another program delete the checkpoint meanwhile?)"
        ) from error


@contextmanager
def writable(path: Path) -> Iterator[None]:
    """Turn an OSError about something that is being written into a CheckpointError."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"{path}: expected to be able to write it, found {error.strerror or error}"
        ) from error


@contextmanager
def interpreted(path: Path, what: str = "a file as it was written") -> Iterator[None]:
    """Turn whatever the content of a damaged or forged file leads to into an error that names the file.

    So what reads a file asks for what it needs, and checks only what would go wrong in silence.
    """
    try:
        yield
    except (CheckpointError, OSError, MemoryError):
        raise
    except Exception as error:
        raise CheckpointDamagedError(
            f"{path}: expected {what}, found {type(error).__name__}: {error!s:.300}"
        ) from error


# ---- reading -----------------------------------------------------------------------------------------


def open_regular(path: Path, *, follow_links: bool = False) -> io.FileIO:
    """Open a regular file for reading, without a buffer.

    Raises:
        CheckpointDamagedError: there is no file; or a directory, a pipe, a device, or a symbolic link that
            is not to be followed.
        CheckpointError: the file cannot be opened.
    """
    flags = os.O_RDONLY | os.O_NONBLOCK  # without O_NONBLOCK, opening a pipe waits for its writer
    try:
        descriptor = os.open(path, flags if follow_links else flags | os.O_NOFOLLOW)
    except OSError as error:
        absent = error.errno in (errno.ENOENT, errno.ELOOP, errno.ENXIO, errno.ENOTDIR)
        found = "a symbolic link" if error.errno == errno.ELOOP else str(error.strerror)
        kind = CheckpointDamagedError if absent else CheckpointError
        raise kind(f"{path}: expected a file that can be read, found: {found}") from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise CheckpointDamagedError(f"{path}: expected a file, found a directory, a pipe or a device")
    return io.FileIO(descriptor, "rb")


def size_of(file: io.FileIO) -> int:
    """Count the bytes of an open file."""
    return os.fstat(file.fileno()).st_size


def fill(target: memoryview, file: io.FileIO, begin: int, path: Path) -> None:
    """Read the bytes of an open file from `begin` on, until the target is full.

    Raises:
        CheckpointDamagedError: the file ends before.
        CheckpointError: the file cannot be read.
    """
    with readable(path):
        file.seek(begin)
        while target:
            count = file.readinto(target)
            if not count:
                raise CheckpointDamagedError(
                    f"{path}: expected {len(target)} bytes more, found the end of the file"
                )
            target = target[count:]


def hash_file(path: Path) -> str:
    """Return the BLAKE3 of a file, as hex digits.

    Raises:
        CheckpointError: there is no regular file, or it cannot be read.
    """
    hashed, block = blake3(), memoryview(bytearray(_BLOCK))
    with open_regular(path) as file, readable(path):
        while count := file.readinto(block):
            hashed.update(block[:count])
    return hashed.hexdigest()


def read_json(path: Path, *, follow_links: bool = False) -> Any:
    """Read a JSON file in which no name stands twice. A link is no file of a checkpoint.

    Raises:
        CheckpointDamagedError: there is none, something else, or more than any such file has.
        CheckpointError: it cannot be read.
    """
    with open_regular(path, follow_links=follow_links) as file:
        if (size := size_of(file)) > _MOST_BYTES:
            raise CheckpointDamagedError(f"{path}: expected at most {_MOST_BYTES} bytes, found {size}")
        content = bytearray(size)
        fill(memoryview(content), file, 0, path)
    return parse_json(content, path)


def parse_json(text: str | bytes | bytearray, path: Path) -> Any:
    """Parse JSON in which no name stands twice, from the file of that path.

    Raises:
        CheckpointDamagedError: it is something else.
    """
    with interpreted(path):
        return json.loads(text, object_pairs_hook=_no_duplicates)


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build a JSON object. (json.loads keeps the last of several entries of one name.)"""
    found = dict(pairs)
    if len(found) < len(pairs):
        (name, _), *_ = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"{name!r:.100} twice")
    return found


# ---- writing -----------------------------------------------------------------------------------------


class HashedFile:
    """A new file that knows the BLAKE3 of what is written to it, and is on disk when it is finished.

    Args:
        path: of a file that is not there yet. A link in its place is not followed.
        size: bytes that will be written. The disk has to have room for them.

    Raises:
        CheckpointError: the file cannot be written, from any method; names the file.
    """

    def __init__(self, path: Path, size: int) -> None:
        self._path, self._hash, self._bytes, self._begun = path, blake3(), 0, 0
        with writable(path), ExitStack() as opened:
            self._file = opened.enter_context(path.open("xb", buffering=0))
            if size and _ADVICE is not None:
                os.posix_fallocate(self._file.fileno(), 0, size)
            opened.pop_all()

    def __enter__(self) -> "HashedFile":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def write(self, data: memoryview | bytes) -> None:
        left = memoryview(data).cast("B")
        with writable(self._path):
            while left:
                count = self._file.write(left[:_BLOCK])
                self._hash.update(left[:count])
                self._bytes += count
                left = left[count:]
                if (length := self._bytes - self._begun) >= _SYNC_BYTES and _ADVICE is not None:
                    # The disk begins to write, while the processor hashes on.
                    os.posix_fadvise(self._file.fileno(), self._begun, length, _ADVICE)
                    self._begun = self._bytes

    def finish(self) -> dict[str, Any]:
        """Wait until everything is on disk, and return {"bytes": length, "blake3": hex digits}."""
        with writable(self._path):
            os.fsync(self._file.fileno())
        return {"bytes": self._bytes, "blake3": self._hash.hexdigest()}


def write_file(path: Path, content: bytes) -> dict[str, Any]:
    """Write a new file durably, and return {"bytes": length, "blake3": hex digits}.

    Raises:
        CheckpointError: it cannot be written.
    """
    with HashedFile(path, len(content)) as file:
        file.write(content)
        return file.finish()


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class LockTaken(RuntimeError):
    """Another program holds the lock. The text names it as far as it is known."""


class Lock:
    """A lock between programs, held until release() or until this process ends, whatever ends it.

    It holds between hosts too, where the shared file system has locks (NFS and Lustre as most are mounted).

    Args:
        path: of a file that is there as long as the lock is held.
        wait_s: how long to wait for another program that holds it.

    Attributes:
        held: False where the file system has no locks; then nothing keeps others out.

    Raises:
        LockTaken: another program holds it.
        OSError: the file cannot be made, or is a symbolic link.
    """

    def __init__(self, path: Path, *, wait_s: float) -> None:
        self._path, self.held = path, False
        limit = time.monotonic() + wait_s
        while not self._take():
            if time.monotonic() > limit:
                with self.file:
                    owner = os.pread(self.file.fileno(), 200, 0).decode(errors="replace")
                raise LockTaken(owner or "another program")
            self.file.close()
            time.sleep(0.05)
        _held.add(self)
        now = time.strftime("%Y-%m-%d %H:%M:%S")
        with suppress(OSError):  # a full disk; the lock holds without its owner's name
            self.file.truncate(0)
            self.file.write(f"process {os.getpid()} on {socket.gethostname()}, since {now}".encode())

    def _take(self) -> bool:
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
        self.file = io.FileIO(os.open(self._path, flags, 0o666), "r+b")
        try:
            fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.held = True
        except (BlockingIOError, PermissionError):
            return False
        except OSError:  # the file system has no locks
            return True
        with suppress(FileNotFoundError):  # its holder has just deleted it
            return os.path.samestat(self._path.lstat(), os.fstat(self.file.fileno()))
        return False

    def release(self) -> None:
        if self not in _held:  # this process is a fork of the owner
            return
        _held.discard(self)
        with suppress(OSError):
            self._path.unlink()
        with suppress(OSError):  # at once, also where a forked child still has the file open
            fcntl.flock(self.file, fcntl.LOCK_UN)
        self.file.close()


_held: set[Lock] = set()


def _close_in_fork() -> None:
    """Close the parent's locks in a fork, which would keep them after the parent's death."""
    while _held:
        _held.pop().file.close()


os.register_at_fork(after_in_child=_close_in_fork)
