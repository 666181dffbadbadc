"""DCP's .metadata without running what is in it.

DCP writes the description of a checkpoint as a pickle, and reading a pickle calls whatever it names. Here it
may name the few classes that such a description consists of, and nothing else.
"""

import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, Metadata, TensorStorageMetadata

from fsdp_utils.checkpoint.errors import CheckpointError

_ALLOWED = {
    "pathlib": {"Path", "PurePath", "PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath"},
    "pathlib._local": {"Path", "PurePath", "PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath"},
    "torch": {"Size"} | {name for name, value in vars(torch).items() if isinstance(value, torch.dtype)},
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _memory_format
        if name not in _ALLOWED.get(module, ()):
            raise pickle.UnpicklingError(
                f"it names {module}.{name}, which no description of a checkpoint needs"
            )
        return super().find_class(module, name)


def _memory_format(enum: Any, name: Any) -> Any:
    """In place of getattr, by which some Pythons (3.11.2, Debian 12's, is one) pickle members of an enum."""
    if enum is not _MEM_FORMAT_ENCODING or name not in _MEM_FORMAT_ENCODING.__members__:
        raise pickle.UnpicklingError(
            "it names builtins.getattr for something else than a memory format, which no description of a "
            "checkpoint needs"
        )
    return _MEM_FORMAT_ENCODING[name]


def read_metadata(directory: Path, rank: int | None = None) -> Metadata:
    """What the DCP checkpoint in that directory says that it holds.

    Args:
        rank: of the ranks' own descriptions (`__<rank>.metadata`, which DCP writes with
            use_collectives=False) the one to read; None for the common one.

    Raises:
        CheckpointError: it is missing or damaged, or it would do something other than describe.
    """
    path = directory / (".metadata" if rank is None else f"__{rank}.metadata")
    try:
        with path.open("rb") as file:
            metadata = _Unpickler(file).load()
        if not isinstance(metadata, Metadata) or not isinstance(metadata.storage_data, dict):
            raise pickle.UnpicklingError(f"it holds {type(metadata).__name__} and no Metadata")
        for index, where in metadata.storage_data.items():
            if Path(where.relative_path).name != where.relative_path:
                raise pickle.UnpicklingError(f"it places {index.fqn} outside of the checkpoint")
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{path}: expected DCP's description of the checkpoint, found no file"
        ) from error
    except Exception as error:
        raise CheckpointError(
            f"{path}: expected DCP's description of the checkpoint, found what cannot be one: {error}"
        ) from error
    return metadata


def specs(metadata: Metadata) -> dict[str, tuple[torch.dtype, torch.Size]]:
    """dtype and whole shape of every tensor in it, by flat name."""
    return {
        key: (entry.properties.dtype, entry.size)
        for key, entry in metadata.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }


def read_any_metadata(directory: Path) -> Metadata:
    """Also of a checkpoint whose ranks have each written a description of their own."""
    parts = [
        read_metadata(directory, int(path.name.split(".")[0].strip("_")))
        for path in sorted(directory.glob("__*.metadata"))
    ]
    if (directory / ".metadata").exists() or not parts:
        return read_metadata(directory)
    whole = parts[0]
    for part in parts[1:]:
        for key, entry in part.state_dict_metadata.items():
            there = whole.state_dict_metadata.setdefault(key, entry)
            if isinstance(there, TensorStorageMetadata) and isinstance(entry, TensorStorageMetadata):
                # (when they are the same, nothing is missing)
                there.chunks += [chunk for chunk in entry.chunks if chunk not in there.chunks]
        whole.storage_data |= part.storage_data
    return whole
