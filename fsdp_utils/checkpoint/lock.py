"""A lock between programs. The operating system takes it back from a program that dies, whatever it dies of.

It holds between hosts too, where the shared file system has locks (NFS and Lustre as most are mounted).
"""

import errno
import json
import os
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl

_TAKEN = (errno.EACCES, errno.EAGAIN, errno.EDEADLK)
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)
_FAR = 2**30  # where Windows locks: readers need the bytes that say who holds the lock
_POLL_S = 0.05


class Taken(RuntimeError):
    """Another program holds the lock. The text says which, as far as it is known."""


class Lock:
    """Held from its making until release(), or until this process ends.

    Args:
        path: of a file that is there as long as the lock is held.
        wait_s: how long to wait for another program that holds it.

    Attributes:
        held: False where the file system has no locks; then nothing keeps others out.

    Raises:
        Taken: another program holds it.
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
                    raise Taken(_owner(path))
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
    """A descriptor of the file itself, never of one that a symbolic link points to."""
    more = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
    return os.open(path, flags | more | getattr(os, "O_NONBLOCK", 0), 0o666)


def try_lock(descriptor: int) -> bool | None:
    """Lock the open file unless another program has. None where the file system has no locks."""
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
    """At once, also where a forked child still has the file open."""
    if sys.platform != "win32":
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)


def is_file(path: Path, descriptor: int) -> bool:
    """Is the open file the one that has that name now?"""
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
