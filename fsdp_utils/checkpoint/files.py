"""Files that another program may have put there, or may be using too: open, lock and replace them safely."""

import errno
import glob
import io
import json
import os
import socket
import stat
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, cast

from fsdp_utils.checkpoint.errors import CheckpointDamagedError, CheckpointError
from fsdp_utils.checkpoint.remote import is_remote

# On POSIX, opening a pipe then returns at once; a regular file is read as ever.
_AT_ONCE = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0) | getattr(os, "O_CLOEXEC", 0)


def open_regular(path: Path) -> io.FileIO:
    """Open a regular file for reading, without a buffer. (Behind a URL: fsspec's file, with its buffer.)

    Raises:
        CheckpointError: it is no regular file.
        OSError: it cannot be opened.
    """
    if is_remote(path):
        return cast(io.FileIO, path.open("rb"))
    descriptor = os.open(path, os.O_RDONLY | _AT_ONCE)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise CheckpointDamagedError(f"{path}: expected a file, found a directory, a pipe or a device")
    return io.FileIO(descriptor, "rb")


def size_of(file: io.FileIO) -> int:
    """Bytes of an open file, which is left at its begin."""
    size = file.seek(0, os.SEEK_END)
    file.seek(0)
    return size


def is_plain_name(name: str) -> bool:
    """Whether the name is that of a file in the directory itself."""
    if name in ("", ".", ".."):
        return False
    return Path(name).name == name and name.isprintable()  # no NUL, and no half of a surrogate pair


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Turn an OSError about a file of that checkpoint into a CheckpointError."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"{error.filename or path}: expected to be able to read it, found {error.strerror or error} (did "
            "another program delete the checkpoint meanwhile?)"
        ) from error


def read_regular(path: Path, *, at_most: int | None = None) -> bytes:
    """Read a whole regular file.

    Raises:
        CheckpointError: it is no regular file, or has more than at_most bytes.
        OSError: it cannot be read.
    """
    with open_regular(path) as file:
        size = size_of(file)
        if at_most is not None and size > at_most:
            raise CheckpointDamagedError(f"{path}: expected at most {at_most} bytes, found {size}")
        return file.read()


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable. (Windows has no such call, and does not need it.)"""
    if os.name == "nt":
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# ---- a lock between programs ------------------------------------------------------------------------


if sys.platform == "win32":
    import msvcrt
else:
    import fcntl

_TAKEN = (errno.EACCES, errno.EAGAIN, errno.EDEADLK)
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)
_FAR = 2**30  # where Windows locks: readers need the bytes that say who holds the lock
_POLL_S = 0.05


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

    def __init__(self, path: Path, *, wait_s: float = 0.0) -> None:
        self._path = path
        limit = time.monotonic() + wait_s
        while True:
            descriptor = open_without_links(path, os.O_RDWR | os.O_CREAT)
            locked = try_lock(descriptor)
            if locked is not False and is_file(path, descriptor):
                break
            os.close(descriptor)  # its holder has just deleted it, or still holds it
            if locked is False:
                if time.monotonic() >= limit:
                    raise LockTaken(_owner(path))
                time.sleep(_POLL_S)
        self._descriptor, self.held = descriptor, bool(locked)
        _held.add(self)
        owner = {"process": os.getpid(), "host": socket.gethostname(), "since": time.time()}
        with suppress(OSError):  # a full disk; the lock holds without its owner's name
            os.ftruncate(descriptor, 0)
            os.write(descriptor, json.dumps(owner).encode())

    def release(self) -> None:
        if self not in _held:  # this process is a fork of the owner
            return
        _held.discard(self)
        with suppress(OSError):  # (Windows deletes no open file, and then it stays)
            self._path.unlink()
        unlock(self._descriptor)
        os.close(self._descriptor)


_held: set[Lock] = set()


def _close_in_fork() -> None:
    """A fork shares its parent's locks, and would keep them after the parent's death."""
    for lock in _held:
        os.close(lock._descriptor)
    _held.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_fork)


def open_without_links(path: Path, flags: int) -> int:
    """Open the file itself, never one that a symbolic link points to."""
    more = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
    return os.open(path, flags | more | getattr(os, "O_NONBLOCK", 0), 0o666)


def try_lock(descriptor: int) -> bool | None:
    """Try to lock an open file: False if another program holds the lock, None if the file system has none."""
    try:
        if sys.platform == "win32":
            os.lseek(descriptor, _FAR, os.SEEK_SET)
            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
            os.lseek(descriptor, 0, os.SEEK_SET)
        else:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _TAKEN:
            return False
        if error.errno in _NO_LOCKS:
            return None
        raise
    return True


def unlock(descriptor: int) -> None:
    """Release the lock at once, also where a forked child still has the file open."""
    if sys.platform != "win32":
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)


def is_file(path: Path, descriptor: int) -> bool:
    """Whether the open file is the one that has that name now."""
    with suppress(FileNotFoundError):
        return os.path.samestat(path.lstat(), os.fstat(descriptor))
    return False


def _owner(path: Path) -> str:
    with suppress(OSError, ValueError, KeyError, TypeError, OverflowError):
        descriptor = open_without_links(path, os.O_RDONLY)
        try:
            owner = json.loads(os.read(descriptor, 1024))
        finally:
            os.close(descriptor)
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(owner["since"]))
        return f"process {int(owner['process'])} on {str(owner['host'])[:100]}, since {since}"
    return "another program"


# ---- atomic replacement -------------------------------------------------------------


PREFIX = ".saving-"
ABANDONED_S = 24 * 3600.0  # where there are no locks, what is older than this has no owner any more


class NewFile:
    """A new file beside the one that it will replace, under a random name that no other program writes to.

    It is locked as long as this process has it. Files that a program left behind are deleted once their lock
    shows that the program has ended.
    """

    def __init__(self, final: Path) -> None:
        self._final = final
        for leftover in final.parent.glob(f"{PREFIX}*-{glob.escape(final.name)}"):
            _delete_if_abandoned(leftover)
        while True:
            self.path = final.with_name(f"{PREFIX}{os.urandom(4).hex()}-{final.name}")
            self._descriptor = open_without_links(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
            if try_lock(self._descriptor) is not False and is_file(self.path, self._descriptor):
                return
            os.close(self._descriptor)  # taken for a leftover before it was locked

    def descriptor(self) -> int:
        """Duplicate the descriptor, to write to and to close. The lock stays."""
        return os.dup(self._descriptor)

    def commit(self) -> None:
        """Rename the file to its final name, which replaces an older one atomically."""
        if os.name == "nt":  # which renames no open file
            self._close()
        self.path.replace(self._final)
        self._close()

    def discard(self) -> None:
        """Delete the file if it was not committed."""
        with suppress(OSError):
            self.path.unlink()
        self._close()

    def _close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


@contextmanager
def replacing(final: Path) -> Iterator[IO[bytes]]:
    """Write a file that becomes `final` if the block succeeds and is deleted otherwise."""
    new = NewFile(final)
    try:
        with os.fdopen(new.descriptor(), "wb") as file:
            yield file
        new.commit()
    finally:
        new.discard()


def _delete_if_abandoned(path: Path) -> None:
    with suppress(OSError):
        descriptor = open_without_links(path, os.O_RDWR)
        try:
            locked = try_lock(descriptor)
            if locked or (locked is None and time.time() - os.fstat(descriptor).st_mtime > ABANDONED_S):
                path.unlink()
        finally:
            os.close(descriptor)
