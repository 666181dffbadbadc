"""Write and read tensors in safetensors files, one file for each rank that has something to write.

A file holds chunks of tensors: of a DTensor, a rank's part. The header says where in the full tensor a chunk
belongs, in the words of torch's HuggingFaceStorageWriter, so that torch's HuggingFaceStorageReader and
safetensors.safe_open read the files, too. A dtype that safetensors has no name for is stored as bytes, with
one more dimension, and noted in the header.

Format: eight bytes with the length of the header, the header in JSON, the tensors' bytes.
Source: https://huggingface.co/docs/safetensors
"""

import json
import struct
from collections.abc import Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from io import FileIO
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement

from fsdp_utils.checkpoint.codec import DTYPES, check_values
from fsdp_utils.checkpoint.errors import CheckpointDamagedError, CheckpointError, CheckpointMismatchError
from fsdp_utils.checkpoint.files import HashedFile, fill, interpreted, open_regular, parse_json, size_of
from fsdp_utils.sharding.local_part import local, local_chunk, view

# Names of dtypes that safetensors and torch's HuggingFaceStorageReader share.
NAMES: dict[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.complex64: "C64",
}
_DTYPE_OF = {name: dtype for dtype, name in NAMES.items()}
_SHARDING, _OFFSETS, _DTYPES = "DCP_SHARDING_INFO", "saved_offsets", "dtypes"  # in the header's metadata
_LENGTH = struct.Struct("<Q")
_MOST_DIMS = 64  # which torch has, too
_MOST_BYTES = 100_000_000  # of a header; the library safetensors has the same limit
# What is not copied in one piece, from a GPU or with other strides, is copied in pieces of about this size.
_PIECE_BYTES = 1 << 24


@dataclass(frozen=True)
class Spec:
    """What a tensor is: its dtype, and its full shape."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


class Chunk(NamedTuple):
    """A stored part of a tensor."""

    path: Path
    begin: int  # of its bytes, in the file
    dtype: torch.dtype
    offsets: tuple[int, ...]  # of the chunk in the tensor, by dimension
    shape: tuple[int, ...]


# ---- writing -----------------------------------------------------------------------------------------


class _Part(NamedTuple):
    """A part of a tensor that this rank writes."""

    key: str
    offsets: tuple[int, ...]
    data: Tensor


def write_tensors(
    path: Path,
    tensors: Mapping[str, Tensor],
    *,
    rank: int,
    world_size: int,
    only_here: Collection[str],
) -> dict[str, Any] | None:
    """Write this rank's chunks of the tensors, in one pass, durably.

    A chunk that several ranks hold is written by one of them: of a DTensor, by the rank whose coordinates on
    the replicated dimensions of the mesh are 0; plain tensors are spread over the ranks by their sizes. So
    all ranks have to pass the same plain tensors. Memory: a copy of at most 16 MiB of a tensor on a GPU.

    Args:
        path: of the new file.
        tensors: by key; DTensors and plain tensors.
        only_here: keys of plain tensors that no other rank passes. This rank writes them.

    Returns:
        {"bytes": length, "blake3": hex digits} of the file; None if this rank has nothing to write, and then
        there is no file.

    Raises:
        CheckpointError: a tensor cannot be stored, or the file cannot be written; names it.
    """
    own = {key for key, tensor in tensors.items() if isinstance(tensor, DTensor)} | set(only_here)
    own |= share({key: one.nbytes for key, one in tensors.items() if key not in own}, rank, world_size)
    parts = [part for key in tensors if key in own and (part := _part(key, tensors[key])) is not None]
    if not parts:
        return None
    parts.sort(key=lambda part: -part.data.dtype.itemsize)  # each begins at a multiple of its itemsize
    header = _header(parts)
    with torch.no_grad(), HashedFile(path, len(header) + sum(part.data.nbytes for part in parts)) as file:
        file.write(header)
        for part in parts:
            for piece in _pieces(part.data):
                file.write(view(piece))
        return file.finish()


def share(sizes: Mapping[str, int], rank: int, world_size: int) -> set[str]:
    """Choose names for this rank such that all ranks get about as many bytes."""
    loads = [0] * world_size
    mine = set()
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        least = loads.index(min(loads))
        loads[least] += sizes[name] + 1
        if least == rank:
            mine.add(name)
    return mine


def _part(key: str, tensor: Tensor) -> _Part | None:
    """The part of a tensor that this rank writes."""
    if isinstance(tensor, DTensor) and not _is_writer(tensor):
        return None
    offsets, data = held_part(key, tensor)
    check_values(key, data)
    if data.numel():
        return _Part(key, offsets, data)
    return None if tensor.numel() else _Part(key, (0,) * tensor.dim(), data.new_empty(tensor.shape))


def _is_writer(tensor: DTensor) -> bool:
    """Whether this rank is the first of those that hold its part. All hold a tensor without elements."""
    coordinates = tensor.device_mesh.get_coordinate()
    return coordinates is not None and all(
        coordinate == 0
        for coordinate, placement in zip(coordinates, tensor.placements, strict=True)
        if placement.is_replicate() or not tensor.numel()
    )


def held_part(key: str, tensor: Tensor) -> tuple[tuple[int, ...], Tensor]:
    """Return the part of a tensor that this rank holds, and its offsets in it, by dimension.

    Raises:
        CheckpointError: the part is a summand (Partial), or not contiguous in the tensor.
    """
    if isinstance(tensor, DTensor) and (strange := _not_contiguous(tensor)):
        raise CheckpointError(
            f"{key}: expected one contiguous part of the tensor on each rank, found {strange}. Redistribute "
            "it to Shard or Replicate first"
        )
    (offsets, sizes), part = local_chunk(tensor), local(tensor).detach()
    if (prod(sizes) or part.numel()) and tuple(part.shape) != sizes:
        raise CheckpointError(f"{key}: expected a part of shape {sizes}, found {tuple(part.shape)}")
    return offsets, part


def _not_contiguous(tensor: DTensor) -> Placement | None:
    """Return a placement that leaves a rank with a summand, or with several pieces of the tensor.

    FSDP over tensor parallelism, of which the mesh has the dimensions in the other order, leaves one piece.
    """
    dims = [getattr(placement, "dim", None) for placement in tensor.placements]
    for index, placement in enumerate(tensor.placements):
        later = zip(tensor.device_mesh.shape[index + 1 :], dims[index + 1 :], strict=True)
        pieces = prod(size for size, dim in later if dim == dims[index])
        if placement.is_partial() or getattr(placement, "split_factor", pieces) != pieces:
            return placement
    return None


def _header(parts: list[_Part]) -> bytes:
    """Pack the header of a file with those parts."""
    specs: dict[str, Spec] = {}
    sharding: dict[str, Any] = {}
    dtypes: dict[str, str] = {}
    for key, offsets, data in parts:
        spec = Spec(data.dtype, tuple(data.shape))
        if data.dtype not in NAMES:
            dtypes[key] = str(data.dtype).removeprefix("torch.")
            spec, offsets = Spec(torch.uint8, (*spec.shape, data.dtype.itemsize)), (*offsets, 0)
        specs[key], sharding[key] = spec, {_OFFSETS: offsets}
    about = {"DCP_VERSION": "1.0", _SHARDING: json.dumps(sharding)}
    if dtypes:
        about[_DTYPES] = json.dumps(dtypes)
    return pack_header(specs, about)


def pack_header(specs: Mapping[str, Spec], about: Mapping[str, str]) -> bytes:
    """Pack the header of a file that holds tensors one after the other, with its length before it.

    Args:
        specs: of the tensors, in their order, by name; of dtypes that NAMES has.
        about: metadata of the file.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **about}}
    end = 0
    for name, spec in specs.items():
        begin, end = end, end + spec.nbytes
        header[name] = {"dtype": NAMES[spec.dtype], "shape": spec.shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # the tensors begin at a multiple of eight
    return _LENGTH.pack(len(text)) + text


def _pieces(data: Tensor) -> Iterator[Tensor]:
    """Yield the values of a tensor, in order, as contiguous tensors in CPU memory."""
    data = data.resolve_conj().resolve_neg().contiguous()
    if data.device.type == "cpu":
        yield data
        return
    for piece in data.view(-1).split(max(1, _PIECE_BYTES // data.dtype.itemsize)):
        yield piece.cpu()


# ---- reading -----------------------------------------------------------------------------------------


def open_tensors(checkpoint: Path, manifest: Mapping[str, Any]) -> "StoredTensors":
    """Read the headers of the files that a checkpoint's manifest names."""
    names = [name for name in manifest["files"] if name.endswith(".safetensors")]
    return StoredTensors(checkpoint, [checkpoint / name for name in names])


class StoredTensors:
    """The tensors in some safetensors files.

    Args:
        where: names all files in errors.
        paths: of the files, whose headers are read.
        follow_links: accept symbolic links, such as those of the Hugging Face cache.

    Attributes:
        chunks: of every tensor, by key.
        specs: dtype and full shape of every tensor, by key.

    Raises:
        CheckpointDamagedError: a file is missing or damaged, or the chunks do not make up the tensors.
    """

    def __init__(self, where: Path, paths: Iterable[Path], *, follow_links: bool = False) -> None:
        self._where, self._follow_links = where, follow_links
        self.chunks: dict[str, list[Chunk]] = {}
        with interpreted(where):
            for path in paths:
                for key, chunk in _read_header(path, follow_links=follow_links).items():
                    self.chunks.setdefault(key, []).append(chunk)
            self.specs = {key: _spec(key, chunks) for key, chunks in self.chunks.items()}

    def read_into(self, tensors: Mapping[str, Tensor], *, threads: int = 1) -> None:
        """Fill tensors in place: plain tensors whole, DTensors with this rank's part.

        Memory: the bytes go straight into the tensors, but for those with another dtype, on a GPU or cut
        along another dimension. For these, each thread has a buffer of 16 MiB, or of one row of the chunk.

        Args:
            tensors: by key. They may have other dtypes than the stored ones, and be sharded in another way.
            threads: how many files to read at a time.

        Raises:
            CheckpointMismatchError: a tensor is not stored, or has another shape; nothing has been changed.
            CheckpointError: a file cannot be read.
        """
        copies: dict[Path, list[_Copy]] = {}
        for key, tensor in tensors.items():
            spec = self.specs.get(key)
            if spec is None or spec.shape != tuple(tensor.shape):
                raise CheckpointMismatchError(
                    f"{self._where}: expected {key} of shape {list(tensor.shape)}, found {spec or 'none'}"
                )
            for copy in self._copies(key, tensor):
                copies.setdefault(copy.chunk.path, []).append(copy)

        def read_file(path: Path) -> None:
            mine = sorted(copies[path], key=lambda copy: copy.chunk.begin)
            # One for all copies: an allocator keeps some of those that are freed in between.
            size = max(copy.rows * copy.row_bytes for copy in mine)
            buffer = torch.empty(size, dtype=torch.uint8, device="cpu")
            with torch.no_grad(), open_regular(path, follow_links=self._follow_links) as file:
                for copy in mine:
                    _read(copy, file, buffer)

        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(read_file, copies))  # raises the first error

    def read_whole(self, key: str) -> Tensor:
        """Read one of the tensors, whole, into CPU memory.

        Raises:
            CheckpointError: its files cannot be read.
        """
        spec = self.specs[key]
        tensor = torch.empty(spec.shape, dtype=spec.dtype, device="cpu")
        self.read_into({key: tensor})
        return tensor

    def _copies(self, key: str, tensor: Tensor) -> Iterator["_Copy"]:
        begin, part = held_part(key, tensor)
        for chunk in self.chunks[key] if part.numel() else ():
            target, offsets = part, []
            for dim, (mine, there) in enumerate(zip(begin, chunk.offsets, strict=True)):
                low = max(mine, there)
                high = min(mine + part.shape[dim], there + chunk.shape[dim])
                target = target.narrow(dim, min(low - mine, part.shape[dim]), max(0, high - low))
                offsets.append(low - there)
            if not target.dim():  # a single number: a row of one
                yield _Copy(chunk._replace(shape=(1,)), (0,), target.view(1))
            elif target.numel():
                yield _Copy(chunk, tuple(offsets), target)


class _Copy(NamedTuple):
    """Something to be copied from a chunk into a part of a tensor."""

    chunk: Chunk
    offsets: tuple[int, ...]  # in the chunk, by dimension
    target: Tensor

    @property
    def row_bytes(self) -> int:
        return prod(self.chunk.shape[1:]) * self.chunk.dtype.itemsize

    @property
    def rows(self) -> int:
        """How many rows of the chunk to read into a buffer at a time; 0 to read straight into the target."""
        target, chunk = self.target, self.chunk
        plain = target.is_contiguous() and not target.is_conj() and not target.is_neg()
        alike = target.shape[1:] == chunk.shape[1:] and target.dtype == chunk.dtype
        if plain and alike and target.device.type == "cpu":
            return 0
        return min(len(target), max(1, _PIECE_BYTES // self.row_bytes))


def _read(copy: _Copy, file: FileIO, buffer: Tensor) -> None:
    chunk, offsets, target = copy
    rows, row_bytes, sizes = copy.rows, copy.row_bytes, tuple(target.shape)
    begin = chunk.begin + offsets[0] * row_bytes
    if rows == 0:
        fill(view(target), file, begin, chunk.path)
        return
    pieces = buffer[: rows * row_bytes].view(chunk.dtype).view(rows, *chunk.shape[1:])
    for first in range(0, sizes[0], rows):
        part = pieces[: sizes[0] - first]
        fill(view(part), file, begin + first * row_bytes, chunk.path)
        for dim, (offset, size) in enumerate(zip(offsets[1:], sizes[1:], strict=True), 1):
            part = part.narrow(dim, offset, size)
        target[first : first + rows].copy_(part)


def _read_header(path: Path, *, follow_links: bool) -> dict[str, Chunk]:
    """Read which chunks are in a file, by key. Their bytes fill the file without holes and without overlap.

    Raises:
        CheckpointDamagedError: it is missing, cut short, or no such file.
    """
    with open_regular(path, follow_links=follow_links) as file:
        size = size_of(file)
        start = bytearray(_LENGTH.size)
        fill(memoryview(start), file, 0, path)
        (length,) = _LENGTH.unpack(start)
        if length > min(size, _MOST_BYTES):
            raise CheckpointDamagedError(
                f"{path}: expected a safetensors file, found {size} bytes that begin with no header of one"
            )
        text = bytearray(length)
        fill(memoryview(text), file, _LENGTH.size, path)
    with interpreted(path, "the header of a safetensors file"):
        return _parse_header(text, path, size)


def _parse_header(text: bytearray, path: Path, size: int) -> dict[str, Chunk]:
    header = parse_json(text, path)
    about = header.pop("__metadata__", {})
    sharding = parse_json(about[_SHARDING], path) if _SHARDING in about else None
    dtypes = parse_json(about.get(_DTYPES, "{}"), path)
    data = end = _LENGTH.size + len(text)
    chunks = {}
    for key, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        (first, last), shape = entry["data_offsets"], entry["shape"]
        offsets = sharding[key][_OFFSETS] if sharding is not None else [0] * len(shape)
        dtype = _DTYPE_OF[entry["dtype"]]
        if not len(offsets) == len(shape) <= _MOST_DIMS:
            raise ValueError(f"{len(shape)} dimensions for {key:.200}, and {len(offsets)} offsets")
        if last - first != prod(shape) * dtype.itemsize or not all(type(size) is int for size in shape):
            raise ValueError(f"{last - first} bytes for {key:.200} as {dtype} of shape {shape!r:.100}")
        if data + first != end:
            raise ValueError(f"{key:.200} from byte {first} on, after one that ends at {end - data}")
        if key in dtypes:  # stored as bytes, with one more dimension
            dtype = DTYPES[dtypes[key]]
            if entry["dtype"] != "U8" or (shape.pop(), offsets.pop()) != (dtype.itemsize, 0):
                raise ValueError(f"{key:.200} as {entry['dtype']} for {dtype}")
        chunks[key] = Chunk(path, end, dtype, tuple(offsets), tuple(shape))
        end = data + last
    if end != size:
        raise ValueError(f"{end} bytes, where the file has {size}: it was cut short, or more was written")
    return chunks


def _spec(key: str, chunks: list[Chunk]) -> Spec:
    """Return what the chunks of a tensor make up.

    Raises:
        CheckpointDamagedError: they do not make up a tensor, each element once; names the files.
    """
    dtype, dims = chunks[0].dtype, len(chunks[0].shape)
    if all((one.dtype, len(one.shape), len(one.offsets)) == (dtype, dims, dims) for one in chunks):
        shape = tuple(max(chunk.offsets[dim] + chunk.shape[dim] for chunk in chunks) for dim in range(dims))
        if _is_tiled(chunks, shape):
            return Spec(dtype, shape)
    found = "; ".join(
        f"{one.dtype} {list(one.shape)} at {list(one.offsets)} in {one.path.name}" for one in chunks[:8]
    )
    raise CheckpointDamagedError(
        f"{chunks[0].path.parent}: expected chunks that make up {key}, each element once, found {found}: a "
        "file is missing, or of another checkpoint"
    )


def _is_tiled(chunks: list[Chunk], shape: tuple[int, ...], dim: int = 0) -> bool:
    """Whether the chunks, which are alike before that dimension, fill the rest without gap and overlap."""
    if dim == len(shape):
        return len(chunks) == 1
    slabs: dict[tuple[int, int], list[Chunk]] = {}
    for chunk in chunks:
        slabs.setdefault((chunk.offsets[dim], chunk.shape[dim]), []).append(chunk)
    end = 0
    for (offset, size), slab in sorted(slabs.items()):
        if offset != end or not _is_tiled(slab, shape, dim + 1):
            return False
        end += size
    return end == shape[dim]
