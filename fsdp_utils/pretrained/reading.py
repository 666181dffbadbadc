"""Open a folder of safetensors files, as transformers' save_pretrained and export_safetensors write it."""

from pathlib import Path

from fsdp_utils.checkpoint.errors import CheckpointDamagedError, CheckpointError
from fsdp_utils.checkpoint.files import read_json
from fsdp_utils.checkpoint.tensor_files import StoredTensors

ONE_FILE, INDEX = "model.safetensors", "model.safetensors.index.json"


def open_folder(folder: Path) -> StoredTensors:
    """Read the headers of a folder's files."""
    if (folder / ONE_FILE).exists():  # transformers, too, ignores an index then
        return StoredTensors([folder / ONE_FILE])
    if not (folder / INDEX).exists():
        there = sorted(path.name for path in folder.iterdir())[:8] if folder.is_dir() else "no folder"
        raise CheckpointError(
            f"{folder}: expected a folder with {ONE_FILE}, or with {INDEX} and the files it names, found "
            f"{there or 'an empty one'}. Give the folder itself, downloaded; save_pretrained() "
            "of transformers and export_safetensors() write such folders"
        )
    try:
        files = set(read_json(folder / INDEX)["weight_map"].values())
        if elsewhere := [name for name in files if not name or Path(name).name != name or "\0" in name]:
            raise ValueError(f"{elsewhere[0]!r}, which is not in the folder")
    except (TypeError, KeyError, ValueError, AttributeError) as error:
        raise CheckpointDamagedError(
            f"{folder / INDEX}: expected the files by tensor under 'weight_map', found {error!r:.100}"
        ) from error
    return StoredTensors([folder / file for file in sorted(files)])
