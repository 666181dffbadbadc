"""Directories behind a URL, such as s3:// and gs://: fsspec's file systems, as universal_pathlib's paths."""

import os
import re
from pathlib import Path
from typing import Any, cast

from fsdp_utils._extras import need
from fsdp_utils.checkpoint.errors import CheckpointError

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+(://|::)")
_MANGLED = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:")


def located(path: str | os.PathLike[str]) -> Path:
    """Return the path, or for a URL one of universal_pathlib, which has the methods of a Path.

    `file://` is the plain path that it stands for, with renames and locks.

    Raises:
        CheckpointError: it is a URL that cannot be opened, or was one.
        ModuleNotFoundError: universal_pathlib is not installed.
    """
    if is_remote(path):
        return cast(Path, path)
    text = os.fspath(path)
    if not _URL.match(text):
        if not isinstance(path, str) and any(_MANGLED.fullmatch(part) for part in Path(path).parts[:1]):
            raise CheckpointError(
                f"{text}: expected a URL as a string, found a Path, which makes one slash of two. Pass the "
                "string, or a UPath"
            )
        return Path(path)
    try:
        found: Any = need("upath", "remote").UPath(text)
        local = found.protocol in ("file", "local") and "::" not in text
        _ = found.fs  # which imports what the protocol needs
    except (ImportError, ValueError) as error:
        if isinstance(error, ModuleNotFoundError) and error.name == "upath":
            raise
        raise CheckpointError(f"{text}: expected a URL that fsspec can open, found: {error}") from error
    return Path(found.path) if local else found


def located_file(path: str | os.PathLike[str], does: str) -> Path:
    """Return the path of a file that is replaced by a rename.

    Args:
        does: the function for which it is, for the error.

    Raises:
        CheckpointError: it is a URL.
    """
    found = located(path)
    if is_remote(found):
        raise CheckpointError(
            f"{does}: expected the path of a file, found the URL {found}. Behind a URL only save_distributed "
            "and load_distributed work"
        )
    return found


def is_remote(path: object) -> bool:
    """Whether it is a path behind a URL: without renames, locks and file descriptors."""
    return not isinstance(path, str | Path) and hasattr(path, "fs")


def refreshed(path: Path) -> Path:
    """The path, of which nothing is remembered: fsspec keeps listings that may be older than other ranks."""
    if is_remote(path):
        cast(Any, path).fs.invalidate_cache()
    return path


def delete(path: Path) -> None:
    """Delete a directory behind a URL, with all that is in it."""
    cast(Any, path).fs.rm(cast(Any, path).path, recursive=True)
