"""One tensor in a file of many, as torch.save writes it: a zip archive with a pickle and the plain bytes."""

import io
import sys
import zipfile
from pathlib import Path
from typing import IO, NamedTuple, cast

import torch
from torch import Tensor

from fsdp_utils.checkpoint.archive import begin_of, check_archive
from fsdp_utils.checkpoint.errors import CheckpointError
from fsdp_utils.checkpoint.hashing_file import HashingFile
from fsdp_utils.checkpoint.plain_data import reason, view
from fsdp_utils.torch_internals.runtime import write_archive


class Item(NamedTuple):
    """Where a tensor is, and what it has to be."""

    path: Path
    offset: int
    length: int
    name: str
    dtype: torch.dtype
    shape: torch.Size


def write_tensor(tensor: Tensor, file: HashingFile) -> None:
    """What torch.save(tensor, file) writes, without the CRC-32 of each part."""
    write_archive(tensor.contiguous(), file)


def find_bytes(item: Item, file: io.RawIOBase, known: dict[bytes, Tensor]) -> int:
    """Where in the file the tensor's bytes begin; they are contiguous from there on.

    Args:
        known: what the heads of archives that were met before describe. An archive's head, all that is before
            the tensor's bytes, is the same for tensors of the same shape.

    Raises:
        CheckpointError: it is another tensor, or none. Nothing that is in the archive was run.
    """
    part = Part(file, item.offset, item.length)
    try:
        with zipfile.ZipFile(part) as archive:  # type: ignore[arg-type]
            inside = {one.filename.partition("/")[2]: one for one in archive.infolist()}
        begin = begin_of(part, inside["data/0"]) if "data/0" in inside else 0
        part.seek(0)
        head = part.read(begin)
        if (found := known.get(head)) is None:
            found = _described(part, inside)
            known[head] = found
        if (found.dtype, found.shape) != (item.dtype, item.shape):
            raise ValueError(f"{found.dtype} {list(found.shape)}")
        if inside["data/0"].file_size != found.nbytes or begin + found.nbytes > item.length:
            raise ValueError(f"{inside['data/0'].file_size} bytes of data")
    except Exception as error:
        raise CheckpointError(
            f"{item.path}: expected {item.name} as {item.dtype} {list(item.shape)} at byte {item.offset}, "
            f"found {reason(error)}"
        ) from error
    return item.offset + begin


def _described(part: "Part", inside: dict[str, zipfile.ZipInfo]) -> Tensor:
    """The tensor that the archive describes, without its bytes."""
    check_archive(part)
    if "byteorder" in inside:  # else torch.load would swap the bytes, of which there are none, and crash
        part.seek(begin_of(part, inside["byteorder"]))
        if part.read(inside["byteorder"].file_size) != sys.byteorder.encode():
            raise ValueError(f"one that was not saved on a {sys.byteorder}-endian machine")
    part.seek(0)
    found = torch.load(cast(IO[bytes], part), map_location="meta", weights_only=True)
    if not isinstance(found, Tensor):
        raise ValueError(f"a {type(found).__name__}")
    if not found.is_contiguous() or found.untyped_storage().nbytes() != found.nbytes:
        raise ValueError("a part of another tensor")
    return found


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
            raise CheckpointError(f"{what}: expected {len(left)} bytes more, found the end of the file")
        left = left[count:]


class Part(io.RawIOBase):
    """A part of a file as a file."""

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
