"""A new file that takes the place of another at once, when it is complete."""

import glob
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from fsdp_utils.checkpoint.lock import is_file, open_without_links, try_lock

PREFIX = ".saving-"
ABANDONED_S = 24 * 3600.0  # where there are no locks, what is older than this has no owner any more


class NewFile:
    """Under a name of its own beside the final one, which nobody else writes to and no link leads away from.

    It is locked as long as this process has it. Those that other programs left behind are deleted, when their
    lock says that the program is no more.
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
        """One more of it, to write to and to close. The lock stays."""
        return os.dup(self._descriptor)

    def commit(self) -> None:
        """Give it its final name."""
        if os.name == "nt":  # which renames no open file
            self._close()
        self.path.replace(self._final)
        self._close()

    def discard(self) -> None:
        """Delete it, if it was not committed."""
        with suppress(OSError):
            self.path.unlink()
        self._close()

    def _close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


@contextmanager
def replacing(final: Path) -> Iterator[IO[bytes]]:
    """A file to write to, which becomes `final` if the block ends well and is deleted otherwise."""
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
