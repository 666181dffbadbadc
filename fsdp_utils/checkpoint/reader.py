"""Read tensors from the files of a distributed checkpoint, straight into their places.

DCP writes each tensor as torch.save does, a zip archive with a pickle and the plain bytes, one after the
other in a file. Its own FileSystemReader unpickles each with torch.load and reads it into new memory.
"""

import io
import sys
import zipfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem

from fsdp_utils.checkpoint.errors import CheckpointDamagedError
from fsdp_utils.checkpoint.files import open_regular
from fsdp_utils.checkpoint.safe_pickle import begin_of, check_archive
from fsdp_utils.checkpoint.user_state import reason, unpack, view


class Item(NamedTuple):
    """A stored chunk of a tensor: where it is, and the dtype and shape that it must have."""

    path: Path
    offset: int
    length: int
    name: str
    dtype: torch.dtype
    shape: torch.Size


# What precedes a tensor's bytes in its archive: the same for tensors of one dtype, shape and length.
KnownHeads = dict[tuple[torch.dtype, torch.Size, int], bytes]


class TensorReads:
    """The reads with which this rank fills its tensors.

    Args:
        tensors: by flat name; DTensors take this rank's part.
        metadata: already read, and thereby harmless.
    """

    def __init__(self, checkpoint: Path, metadata: Metadata, tensors: Mapping[str, Tensor]) -> None:
        self._planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._planner.set_up_planner(dict(tensors), metadata)
        self._reads: dict[Path, list[tuple[ReadItem, Item]]] = {}
        self._begins: dict[Item, int] = {}
        paths: dict[str, Path] = {}
        shapes: dict[str, dict[torch.Size, torch.Size]] = {}  # of chunks, by flat name and offset
        for read in self._planner.create_local_plan().items:
            index = read.storage_index
            entry = metadata.state_dict_metadata[index.fqn]
            if read.type == LoadItemType.BYTE_IO or not isinstance(entry, TensorStorageMetadata):
                raise CheckpointDamagedError(
                    f"{index.fqn}: expected a tensor, found a pickled object, which is not read"
                )
            assert index.offset is not None
            where = metadata.storage_data[MetadataIndex(index.fqn, index.offset)]
            path = paths.setdefault(where.relative_path, checkpoint / where.relative_path)
            if index.fqn not in shapes:
                shapes[index.fqn] = {chunk.offsets: chunk.sizes for chunk in entry.chunks}
            shape, dtype = shapes[index.fqn][index.offset], entry.properties.dtype
            item = Item(path, where.offset, where.length, index.fqn, dtype, shape)
            self._reads.setdefault(path, []).append((read, item))

    def check(self) -> None:
        """Check the head of every archive that read() will read from.

        Raises:
            CheckpointError: a file holds something else.
        """
        known: KnownHeads = {}
        for path, reads in self._reads.items():
            reads.sort(key=lambda one: one[1].offset)
            with open_regular(path) as file:
                for _, item in reads:
                    if item not in self._begins:
                        self._begins[item] = find_bytes(item, file, known)

    def read(self, threads: int = 1) -> None:
        """Fill the tensors, reading `threads` files at a time. Call check() first."""

        def read_file(path: Path) -> None:
            with open_regular(path) as file:
                for read, item in self._reads[path]:
                    target = self._planner.resolve_tensor(read).detach()
                    read_region(item, self._begins[item], file, read.storage_offsets, read.lengths, target)

        with ThreadPoolExecutor(threads) as pool:
            for _ in pool.map(read_file, self._reads):
                pass


def read_tensor(checkpoint: Path, metadata: Metadata, key: str) -> Tensor:
    """Read one full tensor, in this process alone."""
    entry = metadata.state_dict_metadata.get(key)
    if not isinstance(entry, TensorStorageMetadata):
        raise CheckpointDamagedError(f"{checkpoint}: expected a tensor {key!r}, found {entry}")
    try:
        for chunk in entry.chunks:  # a file that is too short costs no memory for the tensor
            where = metadata.storage_data[MetadataIndex(key, chunk.offsets)]
            path, end = checkpoint / where.relative_path, where.offset + where.length
            if (size := path.stat().st_size) < end:
                raise CheckpointDamagedError(
                    f"{path}: expected {end} bytes at least, for {key}, found {size}"
                )
        tensor = torch.empty(entry.size, dtype=entry.properties.dtype)
        reads = TensorReads(checkpoint, metadata, {key: tensor})
        reads.check()
        reads.read()
    except OSError as error:
        raise CheckpointDamagedError(
            f"{error.filename or checkpoint}: expected a file with a part of {key}, found none that can be "
            f"read: {error.strerror}"
        ) from error
    return tensor


def read_plain(checkpoint: Path, metadata: Metadata, key: str) -> Any:
    """Read plain data that is stored as the bytes of a tensor."""
    data = read_tensor(checkpoint, metadata, key)
    try:
        return unpack(view(data).tobytes())
    except Exception as error:
        raise CheckpointDamagedError(
            f"{checkpoint}: expected plain data under {key!r}, found what cannot be read safely: "
            f"{reason(error)}"
        ) from error


# ---- one tensor in a file of many --------------------------------------------------------------------


def find_bytes(item: Item, file: io.RawIOBase, known: KnownHeads) -> int:
    """Find where in the file the tensor's contiguous bytes begin.

    Args:
        known: the heads that were found before; this one is added.

    Raises:
        CheckpointError: it is another tensor, or none. Nothing that is in the archive was run.
    """
    part = Part(file, item.offset, item.length)
    kind = item.dtype, item.shape, item.length
    try:
        if (head := known.get(kind)) is None or part.read(len(head)) != head:
            part.seek(0)
            with zipfile.ZipFile(part) as archive:  # type: ignore[arg-type]
                inside = {one.filename.partition("/")[2]: one for one in archive.infolist()}
            check_archive(part)
            if (
                "byteorder" in inside
            ):  # else torch.load would swap the bytes, of which there are none, and crash
                part.seek(begin_of(part, inside["byteorder"]))
                if part.read(inside["byteorder"].file_size) != sys.byteorder.encode():
                    raise ValueError(f"one that was not saved on a {sys.byteorder}-endian machine")
            part.seek(0)
            found = torch.load(cast(IO[bytes], part), map_location="meta", weights_only=True)
            if not isinstance(found, Tensor):
                raise ValueError(f"a {type(found).__name__}")
            if not found.is_contiguous() or found.untyped_storage().nbytes() != found.nbytes:
                raise ValueError("a part of another tensor")
            if (found.dtype, found.shape) != (item.dtype, item.shape):
                raise ValueError(f"{found.dtype} {list(found.shape)}")
            begin = begin_of(part, inside["data/0"])
            if inside["data/0"].file_size != found.nbytes or begin + found.nbytes > item.length:
                raise ValueError(f"{inside['data/0'].file_size} bytes of data")
            part.seek(0)
            head = known[kind] = part.read(begin)
    except Exception as error:
        raise CheckpointDamagedError(
            f"{item.path}: expected {item.name} as {item.dtype} {list(item.shape)} at byte {item.offset}, "
            f"found {reason(error)}"
        ) from error
    return item.offset + len(head)


def read_region(
    item: Item, begin: int, file: io.RawIOBase, offsets: torch.Size, lengths: torch.Size, target: Tensor
) -> None:
    """Copy a region of the tensor into target, which has the region's shape.

    Args:
        begin: from find_bytes().
        offsets: of the region in the tensor, by dimension.
        lengths: its shape.
        target: of any dtype, on any device. The bytes go straight into it where they need no conversion.
    """
    region = torch.empty(item.shape, dtype=item.dtype, device="meta")
    for dim, (offset, length) in enumerate(zip(offsets, lengths, strict=True)):
        region = region.narrow(dim, offset, length)
    if not region.is_contiguous():
        whole = torch.empty(item.shape, dtype=item.dtype)
        fill(whole, file, begin, f"{item.path}, {item.name}")
        target.copy_(whole.as_strided(region.size(), region.stride(), region.storage_offset()))
        return
    begin += int(region.storage_offset()) * item.dtype.itemsize
    if target.device.type == "cpu" and target.dtype == item.dtype and target.is_contiguous():
        fill(target, file, begin, f"{item.path}, {item.name}")
    else:
        part = torch.empty(lengths, dtype=item.dtype)
        fill(part, file, begin, f"{item.path}, {item.name}")
        target.copy_(part)


def fill(target: Tensor, file: io.RawIOBase, begin: int, what: str) -> None:
    """Read all bytes of a contiguous tensor from there on.

    Raises:
        CheckpointError: the file ends before; begins with `what`.
    """
    left = view(target)
    file.seek(begin)
    while left:
        count = file.readinto(left)
        if not count:
            raise CheckpointDamagedError(
                f"{what}: expected {len(left)} bytes more, found the end of the file"
            )
        left = left[count:]


class Part(io.RawIOBase):
    """A byte range of a file, as a file."""

    def __init__(self, file: io.RawIOBase, offset: int, length: int) -> None:
        super().__init__()
        self._file, self._offset, self._length, self._place = file, offset, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._place

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        self._place = offset + (0, self._place, self._length)[whence]
        return self._place

    def readinto(self, buffer: memoryview, /) -> int:  # type: ignore[override]
        self._file.seek(self._offset + self._place)
        count = self._file.readinto(memoryview(buffer)[: max(0, self._length - self._place)]) or 0
        self._place += count
        return count
