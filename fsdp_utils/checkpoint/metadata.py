"""Read DCP's .metadata without running what is in it, and check that it describes whole tensors.

DCP writes the description of a checkpoint as a pickle. Here it may consist of the few classes that such a
description needs, and nothing in it is imported or called (see safe_pickle.py).
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import fields
from enum import Enum
from itertools import pairwise, product
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Size
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from fsdp_utils.checkpoint.errors import CheckpointDamagedError, CheckpointError
from fsdp_utils.checkpoint.files import is_plain_name, read_regular
from fsdp_utils.checkpoint.manifest import tensor_specs
from fsdp_utils.checkpoint.safe_pickle import MOST_BYTES, Refused, interpret
from fsdp_utils.checkpoint.state import PLAIN
from fsdp_utils.torch_internals.names import MEM_FORMAT_ENCODING, StorageInfo

_DESCRIPTION = "torch.distributed.checkpoint.metadata"
_CLASSES = (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
_FIELDS = {cls: {field.name for field in fields(cls)} for cls in (*_CLASSES, StorageInfo)}
_LAYOUTS = {str(value): value for value in vars(torch).values() if isinstance(value, torch.layout)}


class _Call(Enum):
    """Functions that a description may call."""

    SIZE = "torch.Size"
    LAYOUT = "_get_layout"
    PATH = "a path"
    MEMORY_FORMAT = "_MEM_FORMAT_ENCODING"
    GETATTR = "builtins.getattr"


class _New(NamedTuple):
    """A class that a description may instantiate."""

    cls: type


_NAMES: dict[tuple[str, str], Any] = {
    ("torch", "Size"): _Call.SIZE,
    ("torch.serialization", "_get_layout"): _Call.LAYOUT,
    (_DESCRIPTION, "_MEM_FORMAT_ENCODING"): _Call.MEMORY_FORMAT,
    # by which some Pythons (3.11.2, Debian 12's, is one) pickle members of an enum
    ("builtins", "getattr"): _Call.GETATTR,
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): _New(StorageInfo),
    **{(_DESCRIPTION, cls.__name__): _New(cls) for cls in _CLASSES},
    **{("torch", name): value for name, value in vars(torch).items() if isinstance(value, torch.dtype)},
    **{
        (module, pure + kind): _Call.PATH
        for module in ("pathlib", "pathlib._local")
        for pure in ("", "Pure")
        for kind in ("Path", "PosixPath", "WindowsPath")
    },
}


class _Description:
    """The vocabulary of one .metadata."""

    def __init__(self) -> None:
        self._fresh: dict[int, Any] = {}  # instances that were made and have no state yet, by id

    def name(self, module: str, name: str) -> Any:
        if (module, name) not in _NAMES:
            raise Refused(f"it names {module}.{name}, which no description of a checkpoint needs")
        return _NAMES[module, name]

    def call(self, what: Any, arguments: tuple[Any, ...]) -> Any:
        match what:
            case _New(cls) if not arguments:
                made = object.__new__(cls)
                self._fresh[id(made)] = made
                return made
            case _Call.SIZE:
                (numbers,) = arguments
                return _size(numbers)
            case _Call.LAYOUT:
                return _LAYOUTS[str(_simple(arguments[0]))]
            case _Call.PATH:
                return "/".join(arguments)
            case _Call.MEMORY_FORMAT:
                return MEM_FORMAT_ENCODING(_simple(arguments[0]))
            case _Call.GETATTR:
                enum, name = arguments
                if enum is not _Call.MEMORY_FORMAT or _simple(name) not in MEM_FORMAT_ENCODING.__members__:
                    raise Refused(
                        "it names builtins.getattr for something else than a memory format, which no "
                        "description of a checkpoint needs"
                    )
                return MEM_FORMAT_ENCODING[name]
        raise Refused(f"it calls {str(what)[:80]}, which no description of a checkpoint needs")

    def build(self, target: Any, state: Any) -> Any:
        if self._fresh.pop(id(target), None) is not target:
            raise Refused(f"it changes a {type(target).__name__} that it has not just made")
        if isinstance(target, TensorProperties) and type(state) is tuple:
            target.__setstate__(state)
            return target
        if type(state) is not dict or not state.keys() <= _FIELDS[type(target)]:
            raise Refused(f"it gives a {type(target).__name__} fields that it does not have")
        if isinstance(target, MetadataIndex):  # a key
            _check_index(state.get("fqn"), state.get("offset"))
        for field, value in state.items():
            object.__setattr__(target, field, value)  # (a MetadataIndex is frozen)
        return target

    def persistent_load(self, reference: Any) -> Any:
        raise Refused("it refers to something outside of itself")


def _simple(value: Any) -> str | int:
    """Refuse what is not text or a number as a key: the hash of nested tuples may take forever."""
    if type(value) not in (str, int):
        raise Refused(f"a {type(value).__name__} in the place of a str")
    return value


def _check_index(fqn: Any, offset: Any) -> None:
    if type(fqn) is not str or type(offset) not in (torch.Size, type(None)):
        raise Refused(f"a MetadataIndex of a {type(fqn).__name__} and a {type(offset).__name__}")


def _size(numbers: Any) -> torch.Size:
    if type(numbers) not in (tuple, list) or not all(type(n) is int and 0 <= n < 2**63 for n in numbers):
        raise Refused("a size that is not made of whole numbers of at least 0")
    return torch.Size(numbers)


def _check_parts(metadata: Metadata) -> None:
    """Check that everything has the type that it is used as: a pickle may be assembled in any way."""

    def must(value: Any, *kinds: type) -> None:
        if type(value) not in kinds:
            raise Refused(f"a {type(value).__name__} in the place of a {kinds[0].__name__}")

    must(metadata, Metadata)
    must(metadata.state_dict_metadata, dict)
    must(metadata.storage_data, dict)
    must(metadata.storage_meta, StorageMeta, type(None))
    for key, entry in metadata.state_dict_metadata.items():
        must(key, str)
        must(entry, TensorStorageMetadata, BytesStorageMetadata)
        if isinstance(entry, TensorStorageMetadata):
            must(entry.properties, TensorProperties)
            must(entry.properties.dtype, torch.dtype)
            must(entry.size, torch.Size)
            must(entry.chunks, list)
            for chunk in entry.chunks:
                must(chunk, ChunkStorageMetadata)
                must(chunk.offsets, torch.Size)
                must(chunk.sizes, torch.Size)
    for index, where in metadata.storage_data.items():
        must(index, MetadataIndex)
        must(where, StorageInfo)
        must(where.relative_path, str)
        must(where.offset, int)
        must(where.length, int)
        if where.offset < 0 or where.length < 0:
            raise Refused(f"it places {index.fqn} before the beginning of a file")
        if not is_plain_name(where.relative_path):
            raise Refused(f"it places {index.fqn} outside of the checkpoint")


def _read_one(path: Path) -> Metadata:
    try:
        metadata = cast(Metadata, interpret(read_regular(path, at_most=MOST_BYTES), _Description()))
        _check_parts(metadata)
    except FileNotFoundError as error:
        raise CheckpointDamagedError(
            f"{path}: expected DCP's description of the checkpoint, found no file"
        ) from error
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointDamagedError(
            f"{path}: expected DCP's description of the checkpoint, found what cannot be one: "
            f"{error if isinstance(error, Refused) else f'{type(error).__name__}: {error}'}"
        ) from error
    return metadata


def read_metadata(directory: Path) -> Metadata:
    """Read the description of a DCP checkpoint, whose chunks make up every tensor exactly once.

    Raises:
        CheckpointError: it is missing or damaged, or it would do something other than describe.
    """
    metadata = _read_one(directory / ".metadata")
    check_chunks(directory / ".metadata", metadata)
    return metadata


def read_any_metadata(directory: Path) -> Metadata:
    """Read a description that may be in several files, `__<rank>.metadata`, one of each rank.

    (DCP does so with use_collectives=False.)
    """
    paths = sorted(directory.glob("__*.metadata"))
    if (directory / ".metadata").exists() or not paths:
        return read_metadata(directory)
    whole = _read_one(paths[0])
    for part in map(_read_one, paths[1:]):
        for key, entry in part.state_dict_metadata.items():
            there = whole.state_dict_metadata.setdefault(key, entry)
            if isinstance(there, TensorStorageMetadata) and isinstance(entry, TensorStorageMetadata):
                if there.size != entry.size or there.properties.dtype != entry.properties.dtype:
                    raise CheckpointDamagedError(
                        f"{directory}: expected the descriptions of all ranks to agree, found {key!r} as "
                        f"{there.properties.dtype} {list(there.size)} and as {entry.properties.dtype} "
                        f"{list(entry.size)}"
                    )
                # a tensor that is not sharded is described by every rank
                known = {(chunk.offsets, chunk.sizes) for chunk in there.chunks}
                there.chunks += [one for one in entry.chunks if (one.offsets, one.sizes) not in known]
        whole.storage_data = part.storage_data | whole.storage_data
    check_chunks(directory, whole)
    return whole


def reduced(metadata: Metadata) -> Metadata:
    """Keep only what reading tensors needs: the rest of a forged description may be too deep to be sent."""
    return Metadata(
        {
            key: TensorStorageMetadata(TensorProperties(entry.properties.dtype), entry.size, entry.chunks)
            if isinstance(entry, TensorStorageMetadata)
            else BytesStorageMetadata()
            for key, entry in metadata.state_dict_metadata.items()
        },
        storage_data={
            MetadataIndex(index.fqn, index.offset): StorageInfo(
                where.relative_path, where.offset, where.length
            )
            for index, where in metadata.storage_data.items()
        },
    )


def specs(metadata: Metadata) -> dict[str, tuple[torch.dtype, torch.Size]]:
    """dtype and full shape of every tensor in it, by flat name."""
    return {
        key: (entry.properties.dtype, entry.size)
        for key, entry in metadata.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }


def read_described(checkpoint: Path, manifest: dict[str, Any]) -> Metadata:
    """Read the description of a checkpoint, which must say the same as the manifest of tensors and files."""
    metadata = read_metadata(checkpoint)
    described = {key: spec for key, spec in specs(metadata).items() if not key.startswith(PLAIN)}
    if described != (expected := tensor_specs(manifest)):
        differing = sorted(
            key for key in described.keys() | expected.keys() if described.get(key) != expected.get(key)
        )
        raise CheckpointDamagedError(
            f"{checkpoint / '.metadata'}: expected what the manifest says, found other tensors: "
            + "; ".join(
                f"{key}: expected {expected.get(key)}, found {described.get(key)}" for key in differing[:3]
            )
        )
    for index, where in metadata.storage_data.items():
        entry = manifest["files"].get(where.relative_path)
        if entry is None or not 0 <= where.offset <= where.offset + where.length <= entry["bytes"]:
            raise CheckpointDamagedError(
                f"{checkpoint / '.metadata'}: expected {index.fqn} in a file of the manifest, found it at "
                f"bytes {where.offset} to {where.offset + where.length} of {where.relative_path}"
            )
    return metadata


# ---- the chunks of each tensor ----------------------------------------------------------------------


_MOST_DIMS = 5  # along which a tensor is cut; a mesh of so many dimensions that all cut is not in use


def check_chunks(path: Path, metadata: Metadata) -> None:
    """Check that the chunks make up every tensor, each part once, and have separate places in the files.

    Otherwise some of what is loaded would be whatever was in memory before.

    Args:
        path: what the description was read from, for the error.

    Raises:
        CheckpointError: names the tensor.
    """
    described = sum(
        len(one.chunks)
        for one in metadata.state_dict_metadata.values()
        if isinstance(one, TensorStorageMetadata)
    )
    if described > len(metadata.storage_data):
        raise CheckpointDamagedError(
            f"{path}: expected a place for each of {described} chunks, found {len(metadata.storage_data)}"
        )
    checked: dict[int, TensorStorageMetadata] = {}  # tied tensors share their entry
    for key, entry in metadata.state_dict_metadata.items():
        if not isinstance(entry, TensorStorageMetadata):
            continue
        if id(entry) not in checked:
            if problem := _gap(entry.size, entry.chunks):
                raise CheckpointDamagedError(
                    f"{path}: expected chunks that make up {key} {list(entry.size)}, each part once, found "
                    f"{problem}: a part is missing (was a rank's file left behind?), or the description is "
                    "damaged"
                )
            checked[id(entry)] = entry
        for chunk in entry.chunks:
            where = metadata.storage_data.get(MetadataIndex(key, chunk.offsets))
            needed = entry.properties.dtype.itemsize * prod(chunk.sizes)
            if where is None or where.length < needed:
                raise CheckpointDamagedError(
                    f"{path}: expected the place of {needed} bytes for {key} from {list(chunk.offsets)}, "
                    f"found {'none' if where is None else f'{where.length} bytes'}"
                )
    _check_overlaps(path, metadata)


def _check_overlaps(path: Path, metadata: Metadata) -> None:
    """Refuse two chunks at one place, but for tied tensors: two parts of a model would get the same bytes."""
    places = {
        (where.relative_path, where.offset, where.length, index.fqn, index.offset)
        for index, where in metadata.storage_data.items()
    }
    ordered = sorted(places, key=lambda place: place[:4])
    for (file, begin, length, name, offset), (next_file, next_begin, next_length, other, there) in pairwise(
        ordered
    ):
        tied = (begin, length, offset) == (next_begin, next_length, there) and name != other
        if file == next_file and next_begin < begin + length and not tied:
            raise CheckpointDamagedError(
                f"{path}: expected a place of its own for each chunk, found {name} and {other} at byte "
                f"{next_begin} of {file}"
            )


def _gap(size: Size, chunks: Iterable[ChunkStorageMetadata]) -> str:
    """Say what is wrong with the chunks of a tensor; nothing if they are disjoint and make up all of it.

    A box is known by its corners, each counted with a sign: +1 where an even number of its coordinates are
    ends, else -1. Boxes fill a larger one without overlap exactly when their corners sum up to its corners.
    """
    boxes = [(chunk.offsets, chunk.sizes) for chunk in chunks]
    for offsets, sizes in boxes:
        if not len(offsets) == len(sizes) == len(size):
            return f"one of {len(sizes)} dimensions"
        if any(offset + length > whole for offset, length, whole in zip(offsets, sizes, size, strict=True)):
            return f"one at {list(offsets)} of {list(sizes)}"
    if any(whole == 0 for whole in size):
        return ""
    cut = [dim for dim, whole in enumerate(size) if any(lengths[dim] != whole for _, lengths in boxes)]
    if len(cut) > _MOST_DIMS:
        return f"cuts along {len(cut)} dimensions"
    corners: Counter[tuple[int, ...]] = Counter()

    def add(offsets: Iterable[int], lengths: Iterable[int], weight: int) -> None:
        ends = [((offset, 1), (offset + length, -1)) for offset, length in zip(offsets, lengths, strict=True)]
        for corner in product(*ends):
            corners[tuple(place for place, _ in corner)] += weight * prod(sign for _, sign in corner)

    for offsets, lengths in boxes:
        add([offsets[dim] for dim in cut], [lengths[dim] for dim in cut], 1)
    add([0] * len(cut), [size[dim] for dim in cut], -1)
    missing = [corner for corner, count in corners.items() if count]
    if not missing:
        return ""
    return f"{len(boxes)} that do not fit together at {list(min(missing))} of dimensions {cut}"
