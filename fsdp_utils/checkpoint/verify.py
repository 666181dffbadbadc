"""verify_checkpoint: compare the files of checkpoints with their hashes."""

import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from fsdp_utils.checkpoint.errors import CheckpointDamagedError
from fsdp_utils.checkpoint.files import doing, hash_file, local_path
from fsdp_utils.checkpoint.folder import MANIFEST, checkpoints, find, read_manifest


def verify_checkpoint(path: str | os.PathLike[str]) -> None:
    """Verify that every byte is what was saved. Call it on one rank, or use the command line.

    Args:
        path: a checkpoint of save_distributed, or a directory of such checkpoints, of which all are verified.

    Raises:
        CheckpointError: names the file, what was expected and what was found.

    Example::

        verify_checkpoint("run")  # all checkpoints in the directory
    """
    home = local_path(path)
    latest = find(home)
    for checkpoint in [home] if latest == home else checkpoints(home).values():
        manifest = read_manifest(checkpoint)
        check_sizes(checkpoint, manifest)
        check_hashes(checkpoint, manifest, manifest["files"], threads=os.cpu_count() or 1)


def check_sizes(checkpoint: Path, manifest: Mapping[str, Any]) -> None:
    """Check that a checkpoint has the files that its manifest names, with their sizes, and no others.

    Raises:
        CheckpointError: names the file, what was expected and what was found.
    """
    expected = {name: entry["bytes"] for name, entry in manifest["files"].items()}
    with doing("read", checkpoint):
        there = {path.name: path for path in checkpoint.iterdir() if path.name != MANIFEST}
        found = {name: path.stat().st_size for name, path in there.items() if path.is_file()}
    for name in sorted(expected.keys() | there.keys()):
        if found.get(name) != expected.get(name):
            raise CheckpointDamagedError(
                f"{checkpoint / name}: expected {_bytes(expected.get(name))}, found {_bytes(found.get(name))}"
            )


def _bytes(count: int | None) -> str:
    return "no file of that name" if count is None else f"{count} bytes"


def check_hashes(
    checkpoint: Path, manifest: Mapping[str, Any], names: Iterable[str], *, threads: int = 1
) -> None:
    """Compare the hashes of those files of a checkpoint with its manifest, `threads` files at a time.

    Raises:
        CheckpointError: names the file, what was expected and what was found.
    """

    def check(name: str) -> None:
        expected, found = manifest["files"][name]["blake3"], hash_file(checkpoint / name)
        if found != expected:
            raise CheckpointDamagedError(
                f"{checkpoint / name}: expected blake3 {expected}, found {found}: it is not what was saved "
                "(a damaged disk or copy, or a file of another checkpoint)"
            )

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(check, names))  # raises the first error
