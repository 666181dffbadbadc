"""Open a file that somebody else may have put there: a regular file, never a pipe or a device.

Opening a pipe waits for a writer, and a device such as /dev/zero has no end.
"""

import io
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fsdp_utils.checkpoint.errors import CheckpointError

# On POSIX, opening a pipe then returns at once; a regular file is read as ever.
_AT_ONCE = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0) | getattr(os, "O_CLOEXEC", 0)


def open_regular(path: Path) -> io.FileIO:
    """The file, open for reading without a buffer.

    Raises:
        CheckpointError: it is no regular file.
        OSError: it cannot be opened.
    """
    descriptor = os.open(path, os.O_RDONLY | _AT_ONCE)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise CheckpointError(f"{path}: expected a file, found a directory, a pipe or a device")
    return io.FileIO(descriptor, "rb")


def is_plain_name(name: str) -> bool:
    """May a file have that name, in the directory itself?"""
    if name in ("", ".", ".."):
        return False
    return Path(name).name == name and name.isprintable()  # no NUL, and no half of a surrogate pair


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """What the system says about a file of the checkpoint in that path becomes a CheckpointError."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"{error.filename or path}: expected to be able to read it, found {error.strerror or error} (did "
            "another program delete the checkpoint meanwhile?)"
        ) from error


def read_regular(path: Path, *, at_most: int | None = None) -> bytes:
    """All that is in it.

    Raises:
        CheckpointError: it is no regular file, or has more than at_most bytes.
        OSError: it cannot be read.
    """
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if at_most is not None and size > at_most:
            raise CheckpointError(f"{path}: expected at most {at_most} bytes, found {size}")
        return file.readall()
