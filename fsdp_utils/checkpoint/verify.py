"""verify_checkpoint: is what lies on the disk what was saved?"""

import os
from pathlib import Path

from fsdp_utils.checkpoint.contents import read_state
from fsdp_utils.checkpoint.errors import CheckpointError
from fsdp_utils.checkpoint.full import read_full, verify_file
from fsdp_utils.checkpoint.load import read_described
from fsdp_utils.checkpoint.manifest import (
    MANIFEST,
    Progress,
    check_hashes,
    check_sizes,
    committed,
    find,
    read_manifest,
)
from fsdp_utils.checkpoint.regular import readable


def verify_checkpoint(path: str | os.PathLike[str], *, progress: Progress = lambda count: None) -> None:
    """Is every byte what was saved? For one process: call it on one rank, or use the command line.

    Args:
        path: a file of save_full, a checkpoint of save_distributed, or a directory of such checkpoints, of
            which all are verified.
        progress: told of each piece of work, in bytes of the total that `bytes_of(path)` gives.

    Raises:
        CheckpointError: names the file, what was expected and what was found.
    """
    path = Path(path)
    with readable(path):
        if not path.is_dir():
            verify_file(path, progress=progress)
            read_full(path)
            return
        for checkpoint in checkpoints_in(path):
            manifest = read_manifest(checkpoint)
            check_sizes(checkpoint, manifest)
            check_hashes(
                checkpoint, manifest, manifest["files"], threads=os.cpu_count() or 1, progress=progress
            )
            read_state(checkpoint, read_described(checkpoint, manifest), manifest["tensors"])


def checkpoints_in(path: Path) -> list[Path]:
    """The checkpoint itself, or all that are in the directory."""
    if (path / MANIFEST).exists() or (path / ".metadata").exists() or any(path.glob("__*.metadata")):
        return [path]
    there = [one.path for one in committed(path)]
    if not there:
        find(path, "latest")  # says that there is none
    return there


def bytes_of(path: Path) -> int:
    """How much there is to verify."""
    with readable(path):
        if not path.is_dir():
            return path.stat().st_size if path.exists() else 0
        files = [file for one in checkpoints_in(path) for file in one.iterdir() if file.is_file()]
        return sum(file.stat().st_size for file in files if file.name != MANIFEST)


def newest(path: Path) -> Path:
    """The file or checkpoint itself, or the last checkpoint in the directory."""
    if not path.exists():
        raise CheckpointError(f"{path}: expected a checkpoint, found no such file or directory")
    return checkpoints_in(path)[-1] if path.is_dir() else path
