"""Open a folder of safetensors files, as transformers' save_pretrained and export_safetensors write it."""

from pathlib import Path

from fsdp_utils.checkpoint.errors import CheckpointDamagedError, CheckpointError
from fsdp_utils.checkpoint.files import is_plain_name, read_json
from fsdp_utils.checkpoint.tensor_files import StoredTensors

ONE_FILE, INDEX = "model.safetensors", "model.safetensors.index.json"


def open_folder(folder: Path) -> StoredTensors:
    """Read the headers of a folder's files. Symbolic links, as in the cache of Hugging Face, are followed.

    Raises:
        CheckpointError: there is no such folder, it has no safetensors, or a file is damaged.
    """
    try:
        if (folder / ONE_FILE).exists():  # transformers, too, ignores an index then
            files = [ONE_FILE]
        elif (folder / INDEX).exists():
            files = _files_of(folder / INDEX)
        else:
            there = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else None
            found = "no folder" if there is None else f"{there[:8] or 'an empty one'}"
            raise CheckpointError(
                f"{folder}: expected a folder with {ONE_FILE}, or with {INDEX} and the files it names, found "
                f"{found}. Give the folder itself, downloaded; save_pretrained() of transformers and "
                "export_safetensors() write such folders"
            )
        return StoredTensors(folder, [folder / file for file in files], follow_links=True)
    except CheckpointDamagedError as error:
        raise CheckpointDamagedError(
            f"{error}. Cut short, or a pointer of git-lfs? Download it again"
        ) from error


def _files_of(index: Path) -> list[str]:
    content = read_json(index, follow_links=True)
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not all(map(is_plain_name, weight_map.values())):
        raise CheckpointDamagedError(
            f"{index}: expected JSON with a file of the folder for each tensor under 'weight_map', found "
            f"{content!r:.200}"
        )
    return sorted(set(weight_map.values()))
