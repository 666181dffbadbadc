"""verify_checkpoint: compare the files of checkpoints with their hashes."""

import os
from pathlib import Path

from fsdp_utils.checkpoint.errors import CheckpointNotFoundError
from fsdp_utils.checkpoint.files import readable
from fsdp_utils.checkpoint.full import read_full, verify_file
from fsdp_utils.checkpoint.manifest import (
    MANIFEST,
    Progress,
    check_hashes,
    check_sizes,
    committed,
    find,
    read_manifest,
)
from fsdp_utils.checkpoint.metadata import read_described
from fsdp_utils.checkpoint.remote import located
from fsdp_utils.checkpoint.validate import read_state


def verify_checkpoint(path: str | os.PathLike[str], *, progress: Progress = lambda count: None) -> None:
    """Verify that every byte is what was saved. Call it on one rank, or use the command line.

    Args:
        path: a file of save_full, a checkpoint of save_distributed, or a directory of such checkpoints, of
            which all are verified.
        progress: told of each piece of work, in bytes of the total that `bytes_of(path)` gives.

    Raises:
        CheckpointError: names the file, what was expected and what was found.

    Example::

        verify_checkpoint("run")  # all checkpoints in the directory
    """
    path = located(path)
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
    """List the checkpoint itself, or all in the directory."""
    if (path / MANIFEST).exists() or (path / ".metadata").exists() or any(path.glob("__*.metadata")):
        return [path]
    there = [one.path for one in committed(path)]
    if not there:
        find(path, "latest")  # says that there is none
    return there


def bytes_of(path: Path) -> int:
    """Count the bytes that there are to verify."""
    with readable(path):
        if not path.is_dir():
            return path.stat().st_size if path.exists() else 0
        files = [file for one in checkpoints_in(path) for file in one.iterdir() if file.is_file()]
        return sum(file.stat().st_size for file in files if file.name != MANIFEST)


def newest(path: Path) -> Path:
    """Return the file or checkpoint itself, or the last checkpoint in the directory."""
    if not path.exists():
        raise CheckpointNotFoundError(f"{path}: expected a checkpoint, found no such file or directory")
    return checkpoints_in(path)[-1] if path.is_dir() else path
