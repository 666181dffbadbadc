"""DCP's file storage, with a hash of every file taken while it is written, and no object unpickled."""

import hashlib
import io
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult

from fsdp_utils.checkpoint.errors import CheckpointError
from fsdp_utils.checkpoint.plain import reason, unpack, view
from fsdp_utils.checkpoint.task import Task

# After this many bytes the disk is told to begin, so that it writes while the processor hashes on.
_SYNC_BYTES = 64 << 20


class HashingFile(io.RawIOBase):
    """A file that knows the SHA-256 of what is written to it, and is on disk when it is finished.

    A failed write is reported by finish() and not at once: torch's writer, which is C++, does not survive an
    exception in the middle and would hide it.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path
        self._file = path.open("wb", buffering=1 << 20)
        self._sha256 = hashlib.sha256()
        self._bytes = self._synced = 0
        self._error: OSError | None = None
        self._syncing: Task[None] | None = None

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._bytes

    def write(self, data: Any, /) -> int:
        count = memoryview(data).nbytes
        if self._error is None:
            try:
                self._file.write(data)
                self._sync_sometimes()
            except OSError as error:
                self._error = error
        self._sha256.update(data)
        self._bytes += count
        return count

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


class _HashingFileSystem(FileSystem):
    def __init__(self) -> None:
        self.written: dict[str, dict[str, Any]] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        if mode != "wb":
            with super().create_stream(path, mode) as stream:
                yield stream
            return
        file = HashingFile(Path(path))
        try:
            yield file
        except BaseException:
            file.abandon()
            raise
        self.written[Path(path).name] = file.finish()

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        super().rename(path, new_path)
        self.written[Path(new_path).name] = self.written.pop(Path(path).name)


class Writer(FileSystemWriter):
    """Writes this rank's part, durably, with several threads where there are processors for them.

    Args:
        path: an existing, empty directory.
        tied: flat name of a tensor that is left out -> flat name under which it is there. Both are entered
            in .metadata, over the same bytes, so that plain DCP finds both.
        threads: how many files to write at a time.
    """

    def __init__(self, path: Path, *, tied: dict[str, str], threads: int) -> None:
        super().__init__(path, sync_files=False)  # the streams do it themselves
        self.fs = self._hashing = _HashingFileSystem()
        self._tied = tied
        self._threads = threads

    @property
    def written(self) -> dict[str, dict[str, Any]]:
        """Size and hash of each file that this rank has written, by name."""
        return self._hashing.written

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> torch.futures.Future[list[WriteResult]]:
        # DCP's own threads lose their exceptions; these do not.
        write = super().write_data
        parts = [part for part in _split(plan, self._threads) if part.items]
        tasks = [Task(lambda part=part: write(part, planner).value()) for part in parts]
        for task in tasks:
            task.wait()  # also when one has failed: nobody is to write any more
        results = [result for task in tasks for result in task.result()]
        future: torch.futures.Future[list[WriteResult]] = torch.futures.Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
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
        super().finish(metadata, results)


def _split(plan: SavePlan, parts: int) -> Iterator[SavePlan]:
    """The plan in parts of about the same size, each with file names of its own."""
    sizes = [0] * parts
    items: list[list[Any]] = [[] for _ in range(parts)]
    for item in sorted(plan.items, key=lambda item: -(item.tensor_storage_size() or 0)):
        smallest = sizes.index(min(sizes))
        items[smallest].append(item)
        sizes[smallest] += item.tensor_storage_size() or 0
    for number, some in enumerate(items):
        prefix = replace(plan.storage_data, prefix=f"{plan.storage_data.prefix}{number}_")
        yield replace(plan, items=some, storage_data=prefix if parts > 1 else plan.storage_data)


class Reader(FileSystemReader):
    """Reads the tensors that an already read (and thereby harmless) description points to.

    Args:
        before: called on every rank with what looks at the headers of the items that this rank is about to
            read, before any is read; for files whose hashes were not compared.
    """

    def __init__(
        self, path: Path, metadata: Metadata, before: Callable[[Callable[[], None]], None] | None = None
    ) -> None:
        super().__init__(path)
        self._metadata = metadata
        self._before = before

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        if self._metadata.storage_meta is None:
            self._metadata.storage_meta = StorageMeta()
        self._metadata.storage_meta.load_id = self.load_id
        return self._metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> torch.futures.Future[None]:
        if self._before is not None:
            self._before(lambda: self._look_at(plan))
        return super().read_data(plan, planner)

    def _look_at(self, plan: LoadPlan) -> None:
        for item in plan.items:
            where = self.storage_data[item.storage_index]
            path = Path(self.path) / where.relative_path
            entry = self._metadata.state_dict_metadata[item.storage_index.fqn]
            assert isinstance(entry, TensorStorageMetadata)
            (chunk,) = (chunk for chunk in entry.chunks if chunk.offsets == item.storage_index.offset)
            try:
                with path.open("rb") as file:
                    found = torch.load(self._slice_file(file, where), map_location="meta", weights_only=True)
                if (found.dtype, found.shape) != (entry.properties.dtype, chunk.sizes):
                    raise ValueError(f"{found.dtype} {list(found.shape)}")
            except Exception as error:
                raise CheckpointError(
                    f"{path}: expected {item.storage_index.fqn} as {entry.properties.dtype} "
                    f"{list(chunk.sizes)} at "
                    f"byte {where.offset}, found {reason(error)}"
                ) from error


class TensorsOnly(DefaultLoadPlanner):
    """Loads tensors; anything else in a checkpoint is a pickle, which DCP would run."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        raise CheckpointError(
            f"{read_item.storage_index.fqn}: expected a tensor, found a pickled object, which is not read"
        )


def check_places(checkpoint: Path, metadata: Metadata, files: dict[str, dict[str, Any]]) -> None:
    """Does the description point into files of this checkpoint only, and not beyond their ends?"""
    for index, where in metadata.storage_data.items():
        entry = files.get(where.relative_path)
        if entry is None or not 0 <= where.offset <= where.offset + where.length <= entry["bytes"]:
            raise CheckpointError(
                f"{checkpoint / '.metadata'}: expected {index.fqn} in a file of the manifest, found it at "
                "bytes "
                f"{where.offset} to {where.offset + where.length} of {where.relative_path}"
            )


def read_tensor(checkpoint: Path, metadata: Metadata, key: str) -> Tensor:
    """One whole tensor, read by this process alone."""
    entry = metadata.state_dict_metadata.get(key)
    if not isinstance(entry, TensorStorageMetadata):
        raise CheckpointError(f"{checkpoint}: expected a tensor {key!r}, found {entry}")
    tensors = {key: torch.empty(entry.size, dtype=entry.properties.dtype)}
    with not_distributed_is_fine():
        dcp.load(tensors, storage_reader=Reader(checkpoint, metadata), planner=TensorsOnly(), no_dist=True)
    return tensors[key]


def read_plain(checkpoint: Path, metadata: Metadata, key: str) -> Any:
    """Plain data that is stored as the bytes of a tensor."""
    data = read_tensor(checkpoint, metadata, key)
    try:
        return unpack(view(data).tobytes())
    except Exception as error:
        raise CheckpointError(
            f"{checkpoint}: expected plain data under {key!r}, found what cannot be read safely: "
            f"{reason(error)}"
        ) from error


@contextmanager
def not_distributed_is_fine() -> Iterator[None]:
    """Without DCP's warning that there is no process group."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is (disabled|unavailable)")
        yield
