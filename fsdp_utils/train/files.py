"""Token ids in files: read piece by piece, and refused where the file has changed since the run began."""

import os
import weakref
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path
from typing import Any

__all__ = ["DataError", "TokenFile", "fingerprint", "fingerprint_of_array"]

_BLOCK, _BLOCKS = 16_384, 16  # what of a larger file is hashed: as many blocks, spread evenly


class DataError(RuntimeError):
    """The data is not what the run began with. On the rank that read it; the checkpoints are from before."""


class TokenFile:
    """An array of token ids that lies in a file. `file[3:7]` reads those.

    It is read, and not mapped into memory: where a mapped file is cut short, the kernel ends the process by
    SIGBUS, without a word.

    Args:
        path: the file.
        dtype: of an id, a numpy dtype.
        offset: where in the file they begin, in bytes.
        count: how many there are.
    """

    def __init__(self, path: Path, dtype: Any, offset: int, count: int) -> None:
        self._path, self.dtype, self._offset, self._count = path, dtype, offset, count
        self._file = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self._file)
        self._seen = self._stat()
        self._fingerprint = self._hash()

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, place: slice) -> Any:
        """A numpy array of the ids in `place`.

        Raises:
            DataError: the file has other content than when it was opened.
        """
        import numpy as np

        if self._stat() != self._seen:
            self._must_be_the_same()
        start, stop, _ = place.indices(self._count)
        size = (stop - start) * self.dtype.itemsize
        content = self._read(self._offset + start * self.dtype.itemsize, size)
        if len(content) != size:
            self._must_be_the_same()
            raise DataError(f"{self._path}: expected {size} bytes to read, found {len(content)}")
        return np.frombuffer(content, dtype=self.dtype)

    def fingerprint(self) -> str:
        """Of the content that the file had when it was opened."""
        return self._fingerprint

    def _stat(self) -> tuple[int, int]:
        found = os.fstat(self._file)
        return found.st_size, found.st_mtime_ns

    def _hash(self) -> str:
        return fingerprint(self._read, self._seen[0])

    def _read(self, start: int, count: int) -> bytes:
        try:
            return os.pread(self._file, count, start)
        except OSError as error:
            raise DataError(f"{self._path} can no longer be read: {error}") from error

    def _must_be_the_same(self) -> None:
        before, self._seen = self._fingerprint, self._stat()
        after = self._hash()
        if after != before:
            raise DataError(
                f"{self._path} changed while the run was reading it: expected {before}, found {after}. Bring "
                "the file back and start again; to train on other data, begin another run with another --out."
            )


def fingerprint(read: Callable[[int, int], bytes], size: int) -> str:
    """Size and hash of some content: of all of it up to 256 KiB, of more than that of 16 blocks in it.

    So it notices another file, or one written anew, in no time; it need not notice a single other byte.

    Args:
        read: from a start and a count to the bytes there.
        size: how many there are.
    """
    digest = blake2b(digest_size=8)
    if size <= _BLOCK * _BLOCKS:
        digest.update(read(0, size))
    else:
        for i in range(_BLOCKS):
            digest.update(read((size - _BLOCK) * i // (_BLOCKS - 1), _BLOCK))
    return f"{size:,} bytes with hash {digest.hexdigest()}"


def fingerprint_of_array(array: Any) -> str:
    """As of a file, of the content of a numpy array in one dimension."""
    content = array.view("uint8")
    return fingerprint(lambda start, count: content[start : start + count].tobytes(), len(content))
