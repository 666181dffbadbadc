"""Write and read tensors in safetensors files, one file for each rank that has something to write.

A file holds chunks of tensors: of a DTensor, a rank's part. The header says where in the full tensor a chunk
belongs, in the words of torch's HuggingFaceStorageWriter, so that torch's HuggingFaceStorageReader and
safetensors.safe_open read the files, too.

Format: eight bytes with the length of the header, the header in JSON, the tensors' bytes.
Source: https://huggingface.co/docs/safetensors
"""

import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from io import FileIO
from itertools import chain
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fsdp_utils.checkpoint.errors import CheckpointDamagedError, CheckpointError
from fsdp_utils.checkpoint.files import fill, open_file, write_file
from fsdp_utils.sharding.local_part import is_readable, local, local_chunk, view

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
_SHARDING, _OFFSETS = "DCP_SHARDING_INFO", "saved_offsets"  # in the header's metadata
_LENGTH = 8  # bytes that hold the length of the header
ALIGNED = 64  # tensors begin at a multiple of so many bytes, as in torch's memory: copies are faster
# What is not copied in one piece, from a GPU or with other strides, is copied in pieces of about this size.
_PIECE_BYTES = 1 << 24
Part = tuple[tuple[int, ...], Tensor]  # a chunk's offsets in its tensor, by dimension, and its values


class Chunk(NamedTuple):
    """A stored part of a tensor."""

    path: Path
    begin: int  # offset of its first byte in the file
    dtype: torch.dtype
    offsets: tuple[int, ...]  # the chunk's place in the tensor, by dimension
    shape: tuple[int, ...]

    @property
    def row_bytes(self) -> int:
        return prod(self.shape[1:]) * self.dtype.itemsize


Region = tuple[
    Chunk, tuple[int, ...], Tensor
]  # a chunk, offsets in it, and the tensor that takes what is there
# ---- writing -----------------------------------------------------------------------------------------


def own_parts(
    tensors: Mapping[str, Tensor], *, rank: int, world_size: int, only_here: Collection[str]
) -> dict[str, Part]:
    """Choose the chunks that this rank writes; refuse other dtypes, Partial, on meta, sparse, freed.

    A chunk that several ranks hold is written by one of them: of a DTensor, by the rank whose coordinates on
    the replicated dimensions of the mesh are 0; plain tensors are spread over the ranks by their sizes. So
    all ranks have to pass the same plain tensors, but for those in only_here, which this rank writes.
    """
    full = {k: one for k, one in tensors.items() if k not in only_here and not isinstance(one, DTensor)}
    sizes = {key: one.numel() * one.itemsize for key, one in full.items()}
    plain = {*only_here, *share(sizes, rank, world_size)}
    # Ranks outside of rank 0's mesh may hold a copy, as of experts sharded over one dimension of a mesh.
    has_rank_0 = cache(lambda mesh: bool((mesh.mesh == 0).any()))  # mesh.mesh is made each time
    own = {}
    for key, tensor in tensors.items():
        offsets, part = held_part(key, tensor)
        writes = key in plain
        if isinstance(tensor, DTensor):
            writes = has_rank_0(tensor.device_mesh) and _is_writer(tensor)
            if key in only_here or (rank == 0 and not has_rank_0(tensor.device_mesh)):
                raise CheckpointError(
                    f"{key}: expected a plain tensor in per_rank=, and elsewhere a DTensor over a mesh "
                    "that rank 0 is in, found another DTensor"
                )
        if part.dtype not in NAMES or not is_readable(part):
            raise CheckpointError(
                f"{key}: expected values in memory of their own, of a dtype that safetensors has, found a "
                f"{type(part).__name__} of {part.dtype} on {part.device} with layout {part.layout}. Save "
                "what it consists of, or a .view() of it with another dtype"
            )
        if writes and (part.numel() or not tensor.numel()):
            own[key] = offsets, part
    return own


def write_tensors(path: Path, parts: Mapping[str, Part]) -> dict[str, Any]:
    """Write chunks of tensors in one pass, durably; return what write_file() does."""
    # Each begins at a multiple of its itemsize, and most of ALIGNED: those that would shift others come last.
    ordered = dict(sorted(parts.items(), key=lambda one: (-one[1][1].itemsize, one[1][1].nbytes % ALIGNED)))
    tensors = {key: part for key, (_, part) in ordered.items()}
    sharding = {key: {_OFFSETS: offsets} for key, (offsets, _) in ordered.items()}
    header = pack_header(tensors, {"DCP_VERSION": "1.0", _SHARDING: json.dumps(sharding)})
    with torch.no_grad():
        content = (view(piece) for part in tensors.values() for piece in _pieces(part))
        return write_file(path, chain([header], content))


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


def _is_writer(tensor: DTensor) -> bool:
    """Whether this rank is the first of those that hold its part. All hold a tensor without elements."""
    coordinates = tensor.device_mesh.get_coordinate()
    return coordinates is not None and all(
        coordinate == 0
        for coordinate, placement in zip(coordinates, tensor.placements, strict=True)
        if placement.is_replicate() or not tensor.numel()
    )


def held_part(key: str, tensor: Tensor) -> Part:
    """Return the part of a tensor that this rank holds."""
    if isinstance(tensor, DTensor):
        dims = [getattr(placement, "dim", None) for placement in tensor.placements]
        for index, placement in enumerate(tensor.placements):
            # FSDP over tensor parallelism, with the mesh's dimensions in the other order, leaves one piece.
            later = zip(tensor.device_mesh.shape[index + 1 :], dims[index + 1 :], strict=True)
            pieces = prod(size for size, dim in later if dim == dims[index])
            if placement.is_partial() or getattr(placement, "split_factor", pieces) != pieces:
                raise CheckpointError(
                    f"{key}: expected one contiguous part of the tensor on each rank, found {placement}. "
                    "Redistribute it to Shard or Replicate first"
                )
    (offsets, sizes), part = local_chunk(tensor), local(tensor).detach()
    if not tensor.numel():  # one rank writes the whole
        return offsets, part.new_empty(tensor.shape)
    if (prod(sizes) or part.numel()) and tuple(part.shape) != sizes:
        raise CheckpointError(f"{key}: expected a part of shape {sizes}, found {tuple(part.shape)}")
    return offsets, part


def pack_header(tensors: Mapping[str, Tensor], about: Mapping[str, str]) -> bytes:
    """Pack the header, with its length, of a file that holds these tensors one after the other."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **about}}
    end = 0
    for name, one in tensors.items():
        begin, end = end, end + one.nbytes
        header[name] = {"dtype": NAMES[one.dtype], "shape": one.shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-(_LENGTH + len(text)) % ALIGNED)
    return len(text).to_bytes(_LENGTH, "little") + text


def _pieces(data: Tensor) -> Iterator[Tensor]:
    """Yield the values of a tensor, in order, as contiguous tensors in CPU memory."""
    data = data.resolve_conj().resolve_neg().contiguous()
    for piece in data.view(-1).split(_PIECE_BYTES // data.dtype.itemsize):
        yield piece.cpu()


# ---- reading -----------------------------------------------------------------------------------------


def open_tensors(checkpoint: Path, manifest: Mapping[str, Any]) -> "StoredTensors":
    """Read the headers of the files that a checkpoint's manifest names."""
    names = [name for name in manifest["files"] if name.endswith(".safetensors")]
    return StoredTensors([checkpoint / name for name in names])


class StoredTensors:
    """The tensors in some safetensors files, whose headers are read."""

    def __init__(self, paths: Iterable[Path]) -> None:
        self.chunks: dict[str, list[Chunk]] = {}
        for path in paths:
            for key, chunk in _read_header(path).items():
                self.chunks.setdefault(key, []).append(chunk)
        self.specs: dict[str, Tensor] = {}  # on meta
        for key, chunks in self.chunks.items():
            ends = [map(sum, zip(one.offsets, one.shape, strict=True)) for one in chunks]
            shape = tuple(map(max, zip(*ends, strict=True)))
            self.specs[key] = torch.empty(shape, dtype=chunks[0].dtype, device="meta")
            if (count := sum(prod(one.shape) for one in chunks)) != prod(shape):
                raise CheckpointDamagedError(
                    f"{key}: expected the {prod(shape)} elements of {list(shape)} in the files, found {count}"
                )

    def read_into(self, targets: Iterable[tuple[str, Tensor]], *, threads: int = 1) -> None:
        """Fill tensors in place: plain tensors whole, DTensors with this rank's part.

        The bytes go straight into the tensors, but for those with another dtype, on a GPU or cut along
        another dimension. For these, each thread has a buffer of 16 MiB, or of one row of the chunk.
        """
        by_file: dict[Path, list[Region]] = {}
        for key, tensor in targets:
            for region in self._regions(key, tensor):
                by_file.setdefault(region[0].path, []).append(region)

        def read_some(regions: list[Region]) -> None:
            # One for all regions: an allocator keeps some of those that are freed in between.
            size = max(_PIECE_BYTES, *(chunk.row_bytes for chunk, *_ in regions))
            buffer = torch.empty(size, dtype=torch.uint8, device="cpu")
            with torch.no_grad(), open_file(regions[0][0].path) as file:
                for region in sorted(regions, key=lambda one: one[0].begin):
                    _read(region, file, buffer)

        shares = [some[n::threads] for some in by_file.values() for n in range(min(threads, len(some)))]
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(read_some, shares))  # raises the first error

    def read_whole(self, key: str) -> Tensor:
        """Read one of the tensors, whole, into CPU memory."""
        tensor = torch.empty_like(self.specs[key], device="cpu")
        self.read_into([(key, tensor)])
        return tensor

    def _regions(self, key: str, tensor: Tensor) -> Iterator[Region]:
        begin, part = held_part(key, tensor)
        for chunk in self.chunks[key] if part.numel() else ():
            target, offsets = part, []
            for dim, (mine, there) in enumerate(zip(begin, chunk.offsets, strict=True)):
                low = max(mine, there)
                high = min(mine + part.shape[dim], there + chunk.shape[dim])
                target = target.narrow(dim, min(low - mine, part.shape[dim]), max(0, high - low))
                offsets.append(low - there)
            if not target.dim():  # a single number: a row of one
                yield chunk._replace(shape=(1,)), (0,), target.view(1)
            elif target.numel():
                yield chunk, tuple(offsets), target


def _read(region: Region, file: FileIO, buffer: Tensor) -> None:
    chunk, offsets, target = region
    begin = chunk.begin + offsets[0] * chunk.row_bytes
    plain = target.is_contiguous() and not target.is_conj() and not target.is_neg()
    alike = target.shape[1:] == chunk.shape[1:] and target.dtype == chunk.dtype
    if plain and alike and target.device.type == "cpu":
        fill(view(target), file, begin, chunk.path)
        return
    for rows in target.split(max(1, len(buffer) // chunk.row_bytes)):
        size = len(rows) * chunk.row_bytes
        piece = buffer[:size].view(chunk.dtype).view(len(rows), *chunk.shape[1:])
        fill(view(piece), file, begin, chunk.path)
        begin += size
        for dim in range(1, rows.dim()):
            piece = piece.narrow(dim, offsets[dim], rows.shape[dim])
        rows.copy_(piece)


def _read_header(path: Path) -> dict[str, Chunk]:
    """Read which chunks are in a file, by key. Their bytes fill the file without holes or overlap."""
    with open_file(path) as file:
        size = path.stat().st_size
        length = int.from_bytes(file.read(_LENGTH).ljust(_LENGTH, b"\xff"), "little")
        text = file.read(length) if length <= size else b""
    try:
        header = json.loads(text)
        about = header.pop("__metadata__", {})
        sharding = json.loads(about[_SHARDING]) if _SHARDING in about else {}
        end, chunks = 0, {}
        for key, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
            shape, dtype = tuple(entry["shape"]), _DTYPE_OF[entry["dtype"]]
            first, last = entry["data_offsets"]
            offsets = sharding[key][_OFFSETS] if sharding else (0,) * len(shape)
            if first != end or last - first != prod(shape) * dtype.itemsize or len(offsets) != len(shape):
                raise ValueError(f"bytes {entry['data_offsets']} for {key:.200} as {dtype} {list(shape)[:9]}")
            chunks[key] = Chunk(path, _LENGTH + length + first, dtype, tuple(offsets), shape)
            end = last
        if _LENGTH + length + end != size:
            raise ValueError(f"{_LENGTH + length + end} bytes, where the file has {size}")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointDamagedError(
            f"{path}: expected a safetensors file, found {size} bytes that are none (cut short, or a pointer "
            f"of git-lfs?): {type(error).__name__}: {error!s:.300}"
        ) from error
    return chunks
