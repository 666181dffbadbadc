"""A file that is hashed while it is written, in the same pass."""

import hashlib
import io
import os
from pathlib import Path
from typing import Any

from fsdp_utils.checkpoint.background import Task

# Bytes that are written and then hashed at a time: few enough for both to find them in the processor's cache.
_BLOCK = 1 << 17
# After this many bytes the disk is told to begin, so that it writes while the processor hashes on.
_SYNC_BYTES = 64 << 20


class HashingFile(io.RawIOBase):
    """A file that knows the SHA-256 of what is written to it, and is on disk when it is finished.

    A failed write is reported by finish() and not at once: torch's writer, which is C++, does not survive an
    exception in the middle and would hide it.

    Args:
        path: of a file that is not there yet: a link in its place is not followed.
        descriptor: of the file, if it is open already. It is closed with this one.
    """

    def __init__(self, path: Path, descriptor: int | None = None) -> None:
        super().__init__()
        self._path = path
        # With half a block as its buffer, a whole block is written without another copy.
        if descriptor is None:
            self._file = path.open("xb", buffering=_BLOCK // 2)
        else:
            self._file = os.fdopen(descriptor, "wb", buffering=_BLOCK // 2)
        self._sha256 = hashlib.sha256()
        self._bytes = self._synced = 0
        self._error: OSError | None = None
        self._syncing: Task[None] | None = None

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._bytes

    def write(self, data: Any, /) -> int:
        left = whole = memoryview(data).cast("B")
        while left:
            block, left = left[:_BLOCK], left[_BLOCK:]
            if self._error is None:
                try:
                    self._file.write(block)
                    self._sync_sometimes()
                except OSError as error:
                    self._error = error
            self._sha256.update(block)
            self._bytes += len(block)
        return len(whole)

    def _sync_sometimes(self) -> None:
        if self._bytes - self._synced < _SYNC_BYTES:
            return
        if self._syncing is not None:
            if not self._syncing.done():
                return
            self._syncing.result()
        self._synced = self._bytes
        self._syncing = Task(lambda: _sync_data(self._file.fileno()))

    def finish(self) -> dict[str, Any]:
        """Wait until everything is on disk.

        Returns:
            {"bytes": length, "sha256": hex digest}

        Raises:
            OSError: naming the file; the first thing that went wrong.
        """
        try:
            if self._error is None:
                self._file.flush()
                if self._syncing is not None:
                    self._syncing.result()
                os.fsync(self._file.fileno())
        except OSError as error:
            self._error = error
        finally:
            self.abandon()
        if self._error is not None:
            raise OSError(self._error.errno, self._error.strerror, str(self._path)) from self._error
        return {"bytes": self._bytes, "sha256": self._sha256.hexdigest()}

    def abandon(self) -> None:
        """Close it, whatever is in it."""
        try:
            if self._syncing is not None:
                self._syncing.result()
            self._file.close()  # which flushes
        except OSError as error:
            self._error = self._error or error

    def close(self) -> None:
        """Nothing: DCP closes its streams before it leaves them, and finish() is still to come."""


def _sync_data(descriptor: int) -> None:
    getattr(os, "fdatasync", os.fsync)(descriptor)
