"""verify_checkpoint: compare the files of checkpoints with their hashes."""

import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from fsdp_utils.checkpoint.codec import read_values
from fsdp_utils.checkpoint.errors import CheckpointDamagedError
from fsdp_utils.checkpoint.files import hash_file, interpreted, open_regular, readable, size_of
from fsdp_utils.checkpoint.folder import MANIFEST, every, read_manifest
from fsdp_utils.checkpoint.tensor_files import StoredTensors, open_tensors


def verify_checkpoint(path: str | os.PathLike[str]) -> None:
    """Verify that every byte is what was saved. Call it on one rank, or use the command line.

    Args:
        path: a checkpoint of save_distributed, or a directory of such checkpoints, of which all are verified.

    Raises:
        CheckpointError: names the file, what was expected and what was found.

    Example::

        verify_checkpoint("run")  # all checkpoints in the directory
    """
    for checkpoint in every(path):
        manifest = read_manifest(checkpoint)
        with interpreted(checkpoint / MANIFEST):
            check_files(checkpoint, manifest)
            check_hashes(checkpoint, manifest, manifest["files"], threads=os.cpu_count() or 1)
            stored = open_tensors(checkpoint, manifest)
            check_tensors(checkpoint, manifest, stored)
        for name in manifest["files"]:
            if name.endswith(".json"):
                read_values(checkpoint / name, stored.specs)


def check_files(checkpoint: Path, manifest: Mapping[str, Any]) -> None:
    """Check that a checkpoint has the files that its manifest names, with their sizes, and no others.

    Raises:
        CheckpointError: names the file, what was expected and what was found.
    """
    files = manifest["files"]
    with readable(checkpoint):
        there = {path.name for path in checkpoint.iterdir()} - {MANIFEST}
    if odd := sorted(there ^ files.keys()):
        found = "another one" if odd[0] in there else "none of that name"
        raise CheckpointDamagedError(
            f"{checkpoint / odd[0]}: expected the files that {MANIFEST} names and no others, found {found}"
        )
    for name, entry in files.items():
        with open_regular(checkpoint / name) as file:
            found = size_of(file)
        if found != entry["bytes"]:
            raise CheckpointDamagedError(
                f"{checkpoint / name}: expected {entry['bytes']} bytes, found {found}"
            )


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


def check_tensors(checkpoint: Path, manifest: Mapping[str, Any], stored: StoredTensors) -> None:
    """Check that the files hold the tensors that the manifest names.

    Raises:
        CheckpointDamagedError: names the first one that differs.
    """
    found = {key: f"{spec.dtype} {list(spec.shape)}" for key, spec in stored.specs.items()}
    expected = {key: f"torch.{entry['dtype']} {entry['shape']}" for key, entry in manifest["tensors"].items()}
    for key in sorted(found.keys() | expected.keys()):
        if found.get(key) != expected.get(key):
            raise CheckpointDamagedError(
                f"{checkpoint}: expected {key} as {expected.get(key, 'no tensor')}, which {MANIFEST} says, "
                f"found {found.get(key, 'none')} in the files"
            )
