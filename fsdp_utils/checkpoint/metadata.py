"""Read DCP's .metadata without running what is in it, and check that it describes whole tensors.

DCP writes the description of a checkpoint as a pickle. Here it may consist of the few classes that such a
description needs, and nothing in it is imported or called (see pickled.py).
"""

from dataclasses import fields
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from fsdp_utils.checkpoint.chunks import check_chunks
from fsdp_utils.checkpoint.errors import CheckpointError
from fsdp_utils.checkpoint.pickled import MOST_BYTES, Refused, interpret
from fsdp_utils.checkpoint.regular import is_plain_name, read_regular
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
    """What may be called, besides classes."""

    SIZE = "torch.Size"
    LAYOUT = "_get_layout"
    PATH = "a path"
    MEMORY_FORMAT = "_MEM_FORMAT_ENCODING"
    GETATTR = "builtins.getattr"


class _New(NamedTuple):
    """A class of which new instances may be made."""

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

    def stored(self, reference: Any) -> Any:
        raise Refused("it refers to something outside of itself")


def _simple(value: Any) -> str | int:
    """It is looked up, and the hash of a tuple of tuples may take without end."""
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
    """Is everything of the type that it is used as? (What was pickled may be assembled in any way.)"""

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
        raise CheckpointError(
            f"{path}: expected DCP's description of the checkpoint, found no file"
        ) from error
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(
            f"{path}: expected DCP's description of the checkpoint, found what cannot be one: "
            f"{error if isinstance(error, Refused) else f'{type(error).__name__}: {error}'}"
        ) from error
    return metadata


def read_metadata(directory: Path) -> Metadata:
    """What the DCP checkpoint in that directory says that it holds. Its chunks make up every tensor, once.

    Raises:
        CheckpointError: it is missing or damaged, or it would do something other than describe.
    """
    metadata = _read_one(directory / ".metadata")
    check_chunks(directory / ".metadata", metadata)
    return metadata


def read_any_metadata(directory: Path) -> Metadata:
    """Also of a checkpoint whose ranks have each written a description of their own, `__<rank>.metadata`.

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
                    raise CheckpointError(
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


def specs(metadata: Metadata) -> dict[str, tuple[torch.dtype, torch.Size]]:
    """dtype and whole shape of every tensor in it, by flat name."""
    return {
        key: (entry.properties.dtype, entry.size)
        for key, entry in metadata.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }


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
