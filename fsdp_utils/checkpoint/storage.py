"""DCP's file storage, with a hash of every file taken while it is written, and no object unpickled."""

import io
import os
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.filesystem import (
    DEFAULT_SUFFIX,
    FileSystem,
)
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
)
from torch.distributed.checkpoint.storage import WriteResult

from fsdp_utils.checkpoint.background import Task
from fsdp_utils.checkpoint.errors import CheckpointError
from fsdp_utils.checkpoint.hashing_file import HashingFile
from fsdp_utils.checkpoint.plain_data import reason, unpack, view
from fsdp_utils.checkpoint.regular import open_regular
from fsdp_utils.checkpoint.tensor_archive import Item, find_bytes, read_region, write_tensor
from fsdp_utils.torch_internals.names import StorageInfo, StoragePrefix


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
        rank: which DCP has to know too; without a process group it would let every rank write everything.
        threads: how many files to write at a time.
    """

    def __init__(self, path: Path, *, tied: dict[str, str], rank: int, threads: int) -> None:
        super().__init__(path, sync_files=False)  # the streams do it themselves
        self.fs = self._hashing = _HashingFileSystem()
        self._tied = tied
        self._expected_rank = rank
        self._threads = threads

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if is_coordinator != (self._expected_rank == 0):
            raise RuntimeError("the process group has gone")
        super().set_up_storage_writer(is_coordinator, *args, **kwargs)

    @property
    def written(self) -> dict[str, dict[str, Any]]:
        """Size and hash of each file that this rank has written, by name."""
        return self._hashing.written

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> torch.futures.Future[list[WriteResult]]:
        tasks = [
            Task(lambda number=number, items=items: self._write(plan.storage_data, number, items, planner))
            for number, items in enumerate(_split(plan.items, self._threads))
        ]
        for task in tasks:
            task.wait()  # also when one has failed: nobody is to write any more
        results = [result for task in tasks for result in task.result()]
        future: torch.futures.Future[list[WriteResult]] = torch.futures.Future()
        future.set_result(results)
        return future

    def _write(
        self, named: StoragePrefix, number: int, items: list[WriteItem], planner: SavePlanner
    ) -> list[WriteResult]:
        """One file."""
        name, results = f"{named.prefix}{number}{DEFAULT_SUFFIX}", []
        file = HashingFile(Path(self.path) / name)
        try:
            for item in items:
                tensor = planner.resolve_data(item)
                assert isinstance(tensor, Tensor)
                tensor = tensor.detach().cpu()
                if tensor.untyped_storage().nbytes() != tensor.nbytes:  # else all of the storage is written
                    tensor = tensor.clone()
                begin = file.tell()
                write_tensor(tensor, file)
                length = file.tell() - begin
                results.append(WriteResult(item.index, length, StorageInfo(name, begin, length)))
        except BaseException:
            file.abandon()
            raise
        self.written[name] = file.finish()
        return results

    def storage_meta(self) -> StorageMeta | None:
        """None: DCP would enter the path, which is that of a temporary directory, and of this machine."""
        return None

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


def _split(items: list[WriteItem], parts: int) -> list[list[WriteItem]]:
    """In at most that many lists, of about the same size."""
    sizes = [0] * parts
    lists: list[list[WriteItem]] = [[] for _ in range(parts)]
    for item in sorted(items, key=lambda item: -(item.tensor_storage_size() or 0)):
        smallest = sizes.index(min(sizes))
        lists[smallest].append(item)
        sizes[smallest] += item.tensor_storage_size() or 0
    return [some for some in lists if some]


class Reader(FileSystemReader):
    """Reads the tensors that an already read (and thereby harmless) description points to.

    Args:
        before: called on every rank with what looks at the headers of the items that this rank is about to
            read, before any is read.
        threads: how many files to read at a time.
    """

    def __init__(
        self,
        path: Path,
        metadata: Metadata,
        before: Callable[[Callable[[], None]], None] = lambda look: look(),
        threads: int = 1,
    ) -> None:
        super().__init__(path)
        self._metadata = metadata
        self._before = before
        self._threads = threads

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        if self._metadata.storage_meta is None:
            self._metadata.storage_meta = StorageMeta()
        self._metadata.storage_meta.load_id = self.load_id
        return self._metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> torch.futures.Future[None]:
        by_file: dict[Path, list[ReadItem]] = {}
        for request in plan.items:
            by_file.setdefault(self._item(request).path, []).append(request)
        begins: dict[MetadataIndex, int] = {}

        def look() -> None:
            known: dict[bytes, Tensor] = {}
            for path, requests in by_file.items():
                with open_regular(path) as file:
                    begins.update((r.storage_index, find_bytes(self._item(r), file, known)) for r in requests)

        def read(path: Path) -> None:
            with open_regular(path) as file:
                for request in sorted(by_file[path], key=lambda request: begins[request.storage_index]):
                    if request.type == LoadItemType.BYTE_IO:
                        planner.load_bytes(request, io.BytesIO())
                    target = planner.resolve_tensor(request).detach()
                    where = request.storage_offsets, request.lengths
                    read_region(self._item(request), begins[request.storage_index], file, *where, target)
                    planner.commit_tensor(request, target)

        self._before(look)
        with ThreadPoolExecutor(self._threads) as pool:
            for _ in pool.map(read, by_file):
                pass
        future: torch.futures.Future[None] = torch.futures.Future()
        future.set_result(None)
        return future

    def _item(self, request: ReadItem) -> Item:
        entry = self._metadata.state_dict_metadata[request.storage_index.fqn]
        assert isinstance(entry, TensorStorageMetadata)  # TensorsOnly asks for nothing else
        (chunk,) = (chunk for chunk in entry.chunks if chunk.offsets == request.storage_index.offset)
        return _item(Path(self.path), self._metadata, request.storage_index.fqn, entry, chunk)


def _item(
    checkpoint: Path,
    metadata: Metadata,
    name: str,
    entry: TensorStorageMetadata,
    chunk: ChunkStorageMetadata,
) -> Item:
    where = metadata.storage_data[MetadataIndex(name, chunk.offsets)]
    path = checkpoint / where.relative_path
    return Item(path, where.offset, where.length, name, entry.properties.dtype, chunk.sizes)


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
    items = [_item(checkpoint, metadata, key, entry, chunk) for chunk in entry.chunks]
    try:
        for item in items:  # a file that is too short costs no memory for the tensor
            if (size := item.path.stat().st_size) < item.offset + item.length:
                raise CheckpointError(
                    f"{item.path}: expected {item.offset + item.length} bytes at least, for {key}, found "
                    f"{size}"
                )
        tensor = torch.empty(entry.size, dtype=entry.properties.dtype)
        known: dict[bytes, Tensor] = {}
        for item, chunk in zip(items, entry.chunks, strict=True):
            target = tensor
            for dim, (offset, length) in enumerate(zip(chunk.offsets, chunk.sizes, strict=True)):
                target = target.narrow(dim, offset, length)
            with open_regular(item.path) as file:
                begin = find_bytes(item, file, known)
                read_region(item, begin, file, torch.Size([0] * len(chunk.sizes)), chunk.sizes, target)
    except OSError as error:
        raise CheckpointError(
            f"{error.filename or checkpoint}: expected a file with a part of {key}, found none that can be "
            f"read: {error.strerror}"
        ) from error
    return tensor


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
