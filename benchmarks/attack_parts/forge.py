"""Change the files of a checkpoint as an attacker would, who knows the format and makes all hashes agree."""

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from blake3 import blake3

MANIFEST = "manifest.json"


def hash_of(content: dict[str, Any]) -> str:
    """The hash that a manifest has of itself."""
    return blake3(json.dumps(content, sort_keys=True).encode()).hexdigest()


def forge_manifest(checkpoint: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change a manifest in place; its own hash agrees with it."""
    content = json.loads((checkpoint / MANIFEST).read_text())
    del content["blake3"]
    change(content)
    (checkpoint / MANIFEST).write_text(json.dumps({**content, "blake3": hash_of(content)}))


def forge_hashes(checkpoint: Path) -> None:
    """Let the manifest agree with the files."""

    def update(content: dict[str, Any]) -> None:
        for name in content["files"]:
            data = (checkpoint / name).read_bytes()
            content["files"][name] = {"bytes": len(data), "blake3": blake3(data).hexdigest()}

    forge_manifest(checkpoint, update)


def split(data: bytes) -> tuple[bytes, bytes]:
    """The header of a safetensors file, and the bytes of its tensors."""
    (length,) = struct.unpack("<Q", data[:8])
    return data[8 : 8 + length], data[8 + length :]


def join(header: bytes, tensors: bytes) -> bytes:
    return struct.pack("<Q", len(header)) + header + tensors


def forge_header(path: Path, change: Callable[[dict[str, Any], dict[str, Any]], object]) -> None:
    """Change the header of a rank's file.

    Args:
        change: takes the header, and the place of each chunk: {key: {"saved_offsets": [...]}}.
    """
    text, tensors = split(path.read_bytes())
    header = json.loads(text)
    places = json.loads(header["__metadata__"]["DCP_SHARDING_INFO"])
    change(header, places)
    if isinstance(header.get("__metadata__"), dict):
        header["__metadata__"]["DCP_SHARDING_INFO"] = json.dumps(places)
    path.write_bytes(join(json.dumps(header).encode(), tensors))
