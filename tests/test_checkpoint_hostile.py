"""Checkpoints that somebody made to do harm: refused in words, with nothing run, changed or filled up."""

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from fsdp_utils import (
    CheckpointError,
    export_safetensors,
    load_distributed,
    save_distributed,
    verify_checkpoint,
)
from fsdp_utils.checkpoint.metadata import read_metadata
from tests.test_checkpoint_damage import forge


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    model = nn.Linear(3, 4)
    return save_distributed(tmp_path / "home", model, torch.optim.AdamW(model.parameters()), step=1).wait()


def edit_metadata(checkpoint: Path, change: Callable[[Metadata], object]) -> None:
    path = checkpoint / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    change(metadata)
    path.write_bytes(pickle.dumps(metadata))
    if (checkpoint / "manifest.json").exists():
        forge(checkpoint)


def refused(checkpoint: Path, told: str) -> None:
    """By everything that reads a checkpoint, with the model as it was."""
    model = nn.Linear(3, 4)
    before = model.weight.detach().clone()
    with pytest.raises(CheckpointError, match=told):
        load_distributed(checkpoint.parent, model)
    assert torch.equal(model.weight, before)
    with pytest.raises(CheckpointError, match=told):
        verify_checkpoint(checkpoint)
    with pytest.raises(CheckpointError, match=told):
        export_safetensors(checkpoint, checkpoint.parent.parent / "out")


# ---- the description -----------------------------------------------------------------------------------


def named(module: str, name: str) -> bytes:
    return f"c{module}\n{name}\n".encode()


# state that a pickle gives to a class: attributes of it, by setattr
PATCHES = {
    "a class of the standard library": named("pathlib", "Path")
    + b"(N}\x8c\x06rename"
    + named("torch", "Size")
    + b"stb0",
    "a class of DCP's": named("torch.distributed.checkpoint.metadata", "StorageMeta")
    + b"(N}\x8c\x07modulesK\x07stb0",
    "an instance for the second time": named("torch.distributed.checkpoint.metadata", "StorageMeta")
    + b")\x81}b}b0",
}


@pytest.mark.parametrize("what", PATCHES)
def test_no_state_outlives_a_description(
    what: str, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for cls, name in ((Path, "rename"), (StorageMeta, "modules")):
        before = vars(cls).get(name)
        monkeypatch.setattr(cls, name, before, raising=False)  # puts it back if the test fails
    good = (checkpoint / ".metadata").read_bytes()
    (checkpoint / ".metadata").write_bytes(b"\x80\x04" + PATCHES[what] + good[2:])
    forge(checkpoint)
    rename, modules = Path.rename, vars(StorageMeta).get("modules")
    refused(checkpoint, r"/\.metadata: expected DCP's description of the checkpoint, found what cannot be")
    assert Path.rename is rename
    assert vars(StorageMeta).get("modules") is modules


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_a_description_of_any_protocol_is_read(protocol: int, tmp_path: Path) -> None:
    chunks = [
        ChunkStorageMetadata(torch.Size([row, 0]), torch.Size([rows, 300])) for row, rows in ((0, 2), (2, 1))
    ]
    entry = TensorStorageMetadata(TensorProperties(torch.bfloat16), torch.Size([3, 300]), chunks)
    written = Metadata(
        {"a.x": entry, "alias": entry},
        planner_data={"a.x": ("a", "x"), "list.0": ("list", 0)},
        storage_data={
            MetadataIndex(name, one.offsets, number): _StorageInfo(f"__{number}_0.distcp", 2**40, 5000)
            for name in ("a.x", "alias")
            for number, one in enumerate(chunks)
        },
        storage_meta=StorageMeta(checkpoint_id=Path("/somewhere/else"), save_id="x", modules=["y"]),
        version="1.0.0",
    )
    (tmp_path / ".metadata").write_bytes(pickle.dumps(written, protocol))
    found = read_metadata(tmp_path)
    assert found.storage_meta is not None
    assert written.storage_meta is not None
    assert Path(str(found.storage_meta.checkpoint_id)).name == "else"
    found.storage_meta = written.storage_meta
    assert found == written


# ---- chunks ------------------------------------------------------------------------------------------------


def weight(metadata: Metadata) -> TensorStorageMetadata:
    entry = metadata.state_dict_metadata["model.weight"]
    assert isinstance(entry, TensorStorageMetadata)
    return entry


def resize(metadata: Metadata, offsets: list[int], sizes: list[int]) -> None:
    (chunk,) = weight(metadata).chunks
    chunk.offsets, chunk.sizes = torch.Size(offsets), torch.Size(sizes)


CHUNKS: dict[str, tuple[Callable[[Metadata], object], str]] = {
    "none": (lambda m: weight(m).chunks.clear(), "chunks that make up"),
    "too small": (lambda m: resize(m, [0, 0], [3, 3]), "chunks that make up"),
    "too large": (lambda m: resize(m, [0, 0], [5, 3]), "chunks that make up"),
    "elsewhere": (lambda m: resize(m, [1, 0], [4, 3]), "chunks that make up"),
    "of other dimensions": (lambda m: resize(m, [0], [12]), "chunks that make up"),
    "without a place": (
        lambda m: [
            m.storage_data.pop(index) for index in list(m.storage_data) if index.fqn == "model.weight"
        ],
        r"expected a place for each of \d+ chunks|expected the place of 48 bytes for model.weight",
    ),
    "two in one place": (
        lambda m: next(
            setattr(m.storage_data[one], field, getattr(m.storage_data[other], field))
            for one in m.storage_data
            for other in m.storage_data
            for field in ("offset", "length")
            if (one.fqn, other.fqn) == ("model.bias", "model.weight")
        ),
        "expected a place of its own for each chunk",
    ),
    "of more bytes than there are": (
        lambda m: (
            setattr(m.state_dict_metadata["plain"], "size", torch.Size([2**40])),
            setattr(m.state_dict_metadata["plain"].chunks[0], "sizes", torch.Size([2**40])),
        ),
        r"expected the place of 1099511627776 bytes for plain",
    ),
}


@pytest.mark.parametrize("what", CHUNKS)
def test_chunks_make_up_every_tensor_once(what: str, checkpoint: Path) -> None:
    change, told = CHUNKS[what]
    edit_metadata(checkpoint, change)
    refused(checkpoint, told)


def boxes(*found: tuple[tuple[int, ...], tuple[int, ...]]) -> list[ChunkStorageMetadata]:
    return [ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes in found]


# around the middle of 3 x 3; no straight cut parts them
WHEEL = boxes(((0, 0), (2, 1)), ((2, 0), (1, 2)), ((1, 2), (2, 1)), ((0, 1), (1, 2)))


@pytest.mark.parametrize(
    ("size", "chunks", "whole"),
    [
        ((), boxes(((), ())), True),
        ((), boxes(), False),
        ((), boxes(((), ()), ((), ())), False),
        ((0, 4), boxes(), True),
        ((4, 4), boxes(((0, 0), (4, 4)), ((4, 0), (0, 4))), True),  # the last rank has nothing
        ((3, 3), [*WHEEL, *boxes(((1, 1), (1, 1)))], True),
        ((3, 3), WHEEL, False),
        ((4,), boxes(((0,), (2,)), ((0,), (2,))), False),  # as many numbers as the tensor has
        ((4,), boxes(((0,), (3,)), ((1,), (3,))), False),
    ],
)
def test_what_makes_up_a_tensor(
    size: tuple[int, ...], chunks: list[ChunkStorageMetadata], whole: bool, tmp_path: Path
) -> None:
    entry = TensorStorageMetadata(TensorProperties(torch.float32), torch.Size(size), chunks)
    places = {
        MetadataIndex("x", chunk.offsets): _StorageInfo("a.distcp", number * 1000, 1000)
        for number, chunk in enumerate(chunks)
    } | {MetadataIndex(f"other {number}"): _StorageInfo("b.distcp", 0, 0) for number in range(9)}
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Metadata({"x": entry}, storage_data=places)))
    if whole:
        read_metadata(tmp_path)
    else:
        with pytest.raises(CheckpointError, match="each part once"):
            read_metadata(tmp_path)


def save_without_collectives(folder: Path) -> None:
    from torch.distributed.checkpoint.state_dict import get_model_state_dict
    from torch.distributed.fsdp import fully_shard

    model = nn.Linear(4, 6)
    fully_shard(model)
    dcp.save({"model": get_model_state_dict(model)}, checkpoint_id=folder, use_collectives=False)
    torch.distributed.barrier()


def test_an_incomplete_checkpoint_of_plain_dcp_is_not_exported(two_ranks: Any, tmp_path: Path) -> None:
    two_ranks(save_without_collectives, tmp_path / "c")
    export_safetensors(tmp_path / "c", tmp_path / "out")
    for path in (tmp_path / "c").glob("__1_*.distcp"):
        path.rename(tmp_path / path.name)
    with pytest.raises(CheckpointError, match=r"__1_0\.distcp: expected a file with a part of model\.\w+"):
        export_safetensors(tmp_path / "c", tmp_path / "out2")
    (tmp_path / "c" / "__1.metadata").unlink()
    with pytest.raises(CheckpointError, match=r"model\.\w+ \[.*\], each part once"):
        export_safetensors(tmp_path / "c", tmp_path / "out2")
    assert not list((tmp_path / "out2").glob("*"))
