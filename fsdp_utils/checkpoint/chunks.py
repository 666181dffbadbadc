"""Do the chunks that a description lists make up every tensor, each part exactly once?

Otherwise some of what is loaded would be whatever was in memory before.
"""

from collections import Counter
from collections.abc import Iterable
from itertools import pairwise, product
from math import prod
from pathlib import Path

from torch import Size
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from fsdp_utils.checkpoint.errors import CheckpointError

_MOST_DIMS = 5  # along which a tensor is cut; a mesh of so many dimensions that all cut is not in use


def check_chunks(path: Path, metadata: Metadata) -> None:
    """Is every tensor described as whole, and is there a place of its own for each of its chunks?

    Args:
        path: what the description was read from, for the error.

    Raises:
        CheckpointError: names the tensor.
    """
    described = sum(
        len(one.chunks)
        for one in metadata.state_dict_metadata.values()
        if isinstance(one, TensorStorageMetadata)
    )
    if described > len(metadata.storage_data):
        raise CheckpointError(
            f"{path}: expected a place for each of {described} chunks, found {len(metadata.storage_data)}"
        )
    checked: dict[int, TensorStorageMetadata] = {}  # tied tensors share their entry
    for key, entry in metadata.state_dict_metadata.items():
        if not isinstance(entry, TensorStorageMetadata):
            continue
        if id(entry) not in checked:
            if problem := _gap(entry.size, entry.chunks):
                raise CheckpointError(
                    f"{path}: expected chunks that make up {key} {list(entry.size)}, each part once, found "
                    f"{problem}: a part is missing (was a rank's file left behind?), or the description is "
                    "damaged"
                )
            checked[id(entry)] = entry
        for chunk in entry.chunks:
            where = metadata.storage_data.get(MetadataIndex(key, chunk.offsets))
            needed = entry.properties.dtype.itemsize * prod(chunk.sizes)
            if where is None or where.length < needed:
                raise CheckpointError(
                    f"{path}: expected the place of {needed} bytes for {key} from {list(chunk.offsets)}, "
                    f"found {'none' if where is None else f'{where.length} bytes'}"
                )
    _check_places(path, metadata)


def _check_places(path: Path, metadata: Metadata) -> None:
    """Two chunks at one place would be two parts of a model from the same bytes. Tied tensors may be."""
    places = {
        (where.relative_path, where.offset, where.length, index.fqn, index.offset)
        for index, where in metadata.storage_data.items()
    }
    ordered = sorted(places, key=lambda place: place[:4])
    for (file, begin, length, name, offset), (next_file, next_begin, next_length, other, there) in pairwise(
        ordered
    ):
        tied = (begin, length, offset) == (next_begin, next_length, there) and name != other
        if file == next_file and next_begin < begin + length and not tied:
            raise CheckpointError(
                f"{path}: expected a place of its own for each chunk, found {name} and {other} at byte "
                f"{next_begin} of {file}"
            )


def _gap(size: Size, chunks: Iterable[ChunkStorageMetadata]) -> str:
    """What is wrong with the chunks of a tensor; nothing if they are disjoint and make up all of it.

    A box is known by its corners, each counted with a sign: +1 where an even number of its coordinates are
    ends, else -1. Boxes fill a larger one without overlap exactly when their corners sum up to its corners.
    """
    boxes = [(chunk.offsets, chunk.sizes) for chunk in chunks]
    for offsets, sizes in boxes:
        if not len(offsets) == len(sizes) == len(size):
            return f"one of {len(sizes)} dimensions"
        if any(offset + length > whole for offset, length, whole in zip(offsets, sizes, size, strict=True)):
            return f"one at {list(offsets)} of {list(sizes)}"
    if any(whole == 0 for whole in size):
        return ""
    cut = [dim for dim, whole in enumerate(size) if any(lengths[dim] != whole for _, lengths in boxes)]
    if len(cut) > _MOST_DIMS:
        return f"cuts along {len(cut)} dimensions"
    corners: Counter[tuple[int, ...]] = Counter()

    def add(offsets: Iterable[int], lengths: Iterable[int], weight: int) -> None:
        ends = [((offset, 1), (offset + length, -1)) for offset, length in zip(offsets, lengths, strict=True)]
        for corner in product(*ends):
            corners[tuple(place for place, _ in corner)] += weight * prod(sign for _, sign in corner)

    for offsets, lengths in boxes:
        add([offsets[dim] for dim in cut], [lengths[dim] for dim in cut], 1)
    add([0] * len(cut), [size[dim] for dim in cut], -1)
    missing = [corner for corner, count in corners.items() if count]
    if not missing:
        return ""
    return f"{len(boxes)} that do not fit together at {list(min(missing))} of dimensions {cut}"
