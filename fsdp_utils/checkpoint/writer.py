"""A storage writer for DCP that hashes every file while it writes it."""

import errno
import io
import os
import pickle
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint import StorageWriter
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, DEFAULT_SUFFIX
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from fsdp_utils.checkpoint.manifest import ALGORITHM, ALGORITHMS
from fsdp_utils.checkpoint.remote import is_remote
from fsdp_utils.torch_internals.names import StorageInfo
from fsdp_utils.torch_internals.runtime import write_archive

T = TypeVar("T")

# Bytes that are written and then hashed at a time: few enough for both to find them in the processor's cache.
_BLOCK = 1 << 17
# After this many bytes the disk is told to begin, so that it writes while the processor hashes on.
_SYNC_BYTES = 64 << 20


class Writer(StorageWriter):
    """Writes this rank's part, durably, with several threads where there are processors for them.

    What it writes is what DCP's FileSystemWriter writes, without the CRC-32 of each tensor.

    Args:
        path: an existing, empty directory.
        tied: flat name of a tensor that is left out -> flat name under which it is there. Both are entered
            in .metadata, over the same bytes, so that plain DCP finds both.
        rank: which DCP has to know too; without a process group it would let every rank write everything.
        threads: how many files to write at a time.

    Attributes:
        written: size and hash of each file that this rank has written, by name.
    """

    def __init__(self, path: Path, *, tied: dict[str, str], rank: int, threads: int) -> None:
        super().__init__()
        self._path, self._tied, self._rank, self._threads = path, tied, rank, threads
        self.written: dict[str, dict[str, Any]] = {}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing: it writes one checkpoint."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if is_coordinator != (self._rank == 0):
            raise RuntimeError("the process group has gone")

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> torch.futures.Future[list[WriteResult]]:
        tasks = [
            Task(lambda number=number, items=items: self._write(number, items, planner))
            for number, items in enumerate(_split(plan.items, self._threads))
        ]
        for task in tasks:
            task.wait()  # also when one has failed: nobody is to write any more
        results = [result for task in tasks for result in task.result()]
        future: torch.futures.Future[list[WriteResult]] = torch.futures.Future()
        future.set_result(results)
        return future

    @contextmanager
    def _file(self, name: str) -> Iterator["HashingFile"]:
        with HashingFile(self._path / name) as file:
            yield file
            self.written[name] = file.finish()

    def _write(self, number: int, items: list[WriteItem], planner: SavePlanner) -> list[WriteResult]:
        """One file."""
        name, results = f"__{self._rank}_{number}{DEFAULT_SUFFIX}", []
        with self._file(name) as file:
            for item in items:
                tensor = planner.resolve_data(item)
                assert isinstance(tensor, Tensor)
                tensor = tensor.detach().cpu()
                if tensor.untyped_storage().nbytes() != tensor.nbytes:  # else all of the storage is written
                    tensor = tensor.clone()
                begin = file.tell()
                write_archive(tensor.contiguous(), file)
                length = file.tell() - begin
                results.append(WriteResult(item.index, length, StorageInfo(name, begin, length)))
        return results

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write .metadata, without the path, which is a temporary one."""
        for alias, name in self._tied.items():
            metadata.state_dict_metadata[alias] = metadata.state_dict_metadata[name]
            if metadata.planner_data is not None:
                metadata.planner_data[alias] = ("model", alias.removeprefix("model."))
            results.append(
                [
                    replace(result, index=MetadataIndex(alias, result.index.offset, result.index.index))
                    for part in results
                    for result in part
                    if result.index.fqn == name
                ]
            )
        metadata.version = CURRENT_DCP_VERSION
        metadata.storage_data = {result.index: result.storage_data for part in results for result in part}
        with self._file(".metadata") as file:
            pickle.dump(metadata, file)


def _split(items: list[WriteItem], parts: int) -> list[list[WriteItem]]:
    """Split items into at most `parts` lists of about the same size."""
    sizes = [0] * parts
    lists: list[list[WriteItem]] = [[] for _ in range(parts)]
    for item in sorted(items, key=lambda item: -(item.tensor_storage_size() or 0)):
        smallest = sizes.index(min(sizes))
        lists[smallest].append(item)
        sizes[smallest] += item.tensor_storage_size() or 0
    return [some for some in lists if some]


@contextmanager
def without_process_group_warning() -> Iterator[None]:
    """Silence DCP's warning that there is no process group."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is (disabled|unavailable)")
        yield


class HashingFile(io.RawIOBase):
    """A file that knows the hash of what is written to it, and is on disk when it is finished.

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
        self._local = not is_remote(path)
        if not self._local:
            self._file = cast(io.BufferedWriter, path.open("wb"))
        elif descriptor is None:
            self._file = path.open("xb", buffering=_BLOCK // 2)
        else:
            self._file = os.fdopen(descriptor, "wb", buffering=_BLOCK // 2)
        self._hash = ALGORITHMS[ALGORITHM]()
        self._bytes = self._synced = 0
        self._error: Exception | None = None  # an OSError, or of the package behind a URL
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
                except Exception as error:
                    self._error = error
            self._hash.update(block)
            self._bytes += len(block)
        return len(whole)

    def _sync_sometimes(self) -> None:
        if not self._local or self._bytes - self._synced < _SYNC_BYTES:
            return
        if self._syncing is not None:
            if not self._syncing.done():
                return
            self._syncing.result()
        self._synced = self._bytes
        self._syncing = Task(lambda: _sync_data(self._file.fileno()))

    def finish(self) -> dict[str, Any]:
        """Wait until everything is on disk, or has been sent.

        Returns:
            {"bytes": length, "blake3": hex digest}

        Raises:
            OSError: naming the file; the first thing that went wrong.
        """
        try:
            if self._error is None:
                self._file.flush()
                if self._syncing is not None:
                    self._syncing.result()
                if self._local:
                    os.fsync(self._file.fileno())
        except Exception as error:
            self._error = error
        finally:
            self.abandon()
        if self._error is not None:
            number = getattr(self._error, "errno", None) or errno.EIO
            words = getattr(self._error, "strerror", None) or f"{type(self._error).__name__}: {self._error}"
            raise OSError(number, words, str(self._path)) from self._error
        return {"bytes": self._bytes, ALGORITHM: self._hash.hexdigest()}

    def __exit__(self, *_: object) -> None:
        self.abandon()

    def abandon(self) -> None:
        """Close the file, complete or not."""
        try:
            if self._syncing is not None:
                self._syncing.result()
            self._file.close()  # which flushes
        except Exception as error:
            self._error = self._error or error

    def close(self) -> None:
        """Nothing: DCP closes its streams before it leaves them, and finish() is still to come."""


def _sync_data(descriptor: int) -> None:
    getattr(os, "fdatasync", os.fsync)(descriptor)


class Task(Generic[T]):
    """A call in a thread of its own, with its result or its exception. It begins at once.

    Not concurrent.futures: its executors refuse work once the program is ending, which is when a last
    asynchronous save may still have some.
    """

    def __init__(self, fn: Callable[[], T]) -> None:
        self._fn = fn
        self._results: list[T] = []
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._results.append(self._fn())
        except BaseException as error:
            self._error = error

    def done(self) -> bool:
        return not self._thread.is_alive()

    def wait(self) -> None:
        """Wait until it has ended, successfully or not."""
        self._thread.join()

    def result(self) -> T:
        """Wait for it, and return what it returned or raise what it raised."""
        self.wait()
        if self._error is not None:
            raise self._error
        return self._results[0]
