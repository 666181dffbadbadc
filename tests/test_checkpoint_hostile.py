"""Checkpoints that somebody made to do harm: refused in words, with nothing run, changed or filled up."""

import contextlib
import dataclasses
import errno
import hashlib
import io
import json
import multiprocessing
import os
import pickle
import shutil
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
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
    load_full,
    save_distributed,
    save_full,
    verify_checkpoint,
)
from fsdp_utils.checkpoint import commit, manifest
from fsdp_utils.checkpoint import save as save_module
from fsdp_utils.checkpoint.__main__ import main
from fsdp_utils.checkpoint.commit import begin
from fsdp_utils.checkpoint.files import Lock, NewFile
from fsdp_utils.checkpoint.full import _seal
from fsdp_utils.checkpoint.manifest import ALGORITHM, MANIFEST, write_manifest
from fsdp_utils.checkpoint.metadata import read_metadata
from fsdp_utils.checkpoint.reader import Item, find_bytes
from fsdp_utils.checkpoint.safe_pickle import Refused
from fsdp_utils.checkpoint.user_state import pack, unpack, view
from tests.test_checkpoint_damage import forge, reseal


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


# Each of a hundred tuples holds the one before twice: Python would compute 2**100 hashes.
ENDLESS = b"K\x01" + b"".join(b"q%cj%c\0\0\0\x86" % (n, n) for n in range(100))
DCP = "torch.distributed.checkpoint.metadata"
HASHED = {
    "a name": b"}" + named(DCP, "MetadataIndex") + b")\x81}X\x03\0\0\0fqn" + ENDLESS + b"sbNs.",
    "a layout": named("torch.serialization", "_get_layout") + ENDLESS + b"\x85R.",
    "a memory format": named(DCP, "_MEM_FORMAT_ENCODING") + ENDLESS + b"\x85R.",
    "a member": named("builtins", "getattr") + named(DCP, "_MEM_FORMAT_ENCODING") + ENDLESS + b"\x86R.",
}


@pytest.mark.parametrize("what", HASHED)
def test_nothing_is_hashed_that_takes_without_end(what: str, tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(b"\x80\x02" + HASHED[what])
    with pytest.raises(CheckpointError, match="a tuple"):
        read_metadata(tmp_path)


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


def load_into_a_linear(home: Path) -> Any:
    return load_distributed(home, nn.Linear(3, 4), wait_s=5)


def test_the_ranks_are_sent_only_what_reading_tensors_needs(two_ranks: Any, checkpoint: Path) -> None:
    path = checkpoint / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    metadata.planner_data["model.weight"] = ("model", "MARKER")
    marker, deep = b"X\x06\0\0\0MARKER", b"]" * 20_000 + b"a" * 19_999
    path.write_bytes(pickle.dumps(metadata, protocol=2).replace(marker, deep))
    assert deep in path.read_bytes()
    forge(checkpoint)
    assert two_ranks(load_into_a_linear, checkpoint.parent) == [{"step": 1}] * 2


# ---- chunks ------------------------------------------------------------------------------------------------


def entry_of(metadata: Metadata, key: str) -> TensorStorageMetadata:
    entry = metadata.state_dict_metadata[key]
    assert isinstance(entry, TensorStorageMetadata)
    return entry


def weight(metadata: Metadata) -> TensorStorageMetadata:
    return entry_of(metadata, "model.weight")


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
            setattr(entry_of(m, "plain"), "size", torch.Size([2**40])),
            setattr(entry_of(m, "plain").chunks[0], "sizes", torch.Size([2**40])),
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


# ---- the manifest ----------------------------------------------------------------------------------------


MANIFESTS: dict[str, Callable[[dict[str, Any]], object]] = {
    "without step": lambda m: m.pop("step"),
    "without tensors": lambda m: m.pop("tensors"),
    "a step that is no number": lambda m: m.update(step="1"),
    "a step below 0": lambda m: m.update(step=-1),
    "files in a list": lambda m: m.update(files=list(m["files"])),
    "a file without a size": lambda m: m["files"][".metadata"].pop("bytes"),
    "a file elsewhere": lambda m: m["files"].update({"../x": m["files"][".metadata"]}),
    "a dtype that is a function": lambda m: m["tensors"]["model.weight"].update(dtype="load"),
    "a shape of text": lambda m: m["tensors"]["model.weight"].update(shape=["4", "3"]),
    "a shape beyond measure": lambda m: m["tensors"]["model.weight"].update(shape=[2**64]),
    "tied to nothing": lambda m: m.update(tied={"weight": "nothing"}),
    "a config that is text": lambda m: m.update(config="x"),
}


@pytest.mark.parametrize("what", MANIFESTS)
def test_a_forged_manifest_is_refused_before_anything_is_touched(what: str, checkpoint: Path) -> None:
    content = json.loads((checkpoint / MANIFEST).read_text())
    del content[ALGORITHM]
    MANIFESTS[what](content)
    write_manifest(checkpoint, content)
    refused(checkpoint, r"manifest\.json: expected the manifest of a checkpoint, found")


@pytest.mark.parametrize(
    "text", ["[" * 100_000, "[]", "null", "7" * 10_000, '{"sha256": []}', '{"blake3": []}']
)
def test_a_manifest_that_is_none_is_refused(text: str, checkpoint: Path) -> None:
    (checkpoint / MANIFEST).write_text(text)
    refused(checkpoint, r"manifest\.json: expected ")


# ---- the hashes ------------------------------------------------------------------------------------------


def sha256_of(checkpoint: Path) -> dict[str, Any]:
    """The content of a manifest as the version before BLAKE3 wrote it, without the manifest's own hash."""
    content = json.loads((checkpoint / MANIFEST).read_text())
    del content[ALGORITHM]
    for name in content["files"]:
        data = (checkpoint / name).read_bytes()
        content["files"][name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    return content


def write_by_hand(checkpoint: Path, content: dict[str, Any], algorithm: str = "sha256") -> None:
    own = hashlib.new(algorithm, json.dumps(content, sort_keys=True).encode()).hexdigest()
    (checkpoint / MANIFEST).write_text(json.dumps({**content, algorithm: own}))


def test_an_older_checkpoint_with_sha256_is_verified_and_loaded(checkpoint: Path) -> None:
    assert "sha256" not in (checkpoint / MANIFEST).read_text()
    write_by_hand(checkpoint, sha256_of(checkpoint))
    verify_checkpoint(checkpoint)
    model = nn.Linear(3, 4)
    assert load_distributed(checkpoint.parent, model)["step"] == 1
    torch.manual_seed(0)
    assert torch.equal(model.weight, nn.Linear(3, 4).weight)

    data = bytearray((checkpoint / "__0_0.distcp").read_bytes())
    data[len(data) // 2] ^= 1
    (checkpoint / "__0_0.distcp").write_bytes(data)
    refused(checkpoint, r"__0_0\.distcp: expected sha256 \w{64}, found \w{64}: it is not what was saved")


def test_an_older_manifest_with_sha256_that_was_edited_is_refused(checkpoint: Path) -> None:
    write_by_hand(checkpoint, sha256_of(checkpoint))
    text = (checkpoint / MANIFEST).read_text()
    (checkpoint / MANIFEST).write_text(text.replace('"step": 1', '"step": 5'))
    refused(checkpoint, r"manifest\.json: expected a manifest with sha256 \w{64}, found \w{64}")


def test_an_older_file_with_sha256_is_verified_and_loaded(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, path = nn.Linear(3, 4), tmp_path / "one.pt"
    save_full(path, model, epoch=3)
    torch.save(torch.load(path, weights_only=True), path)  # without the seal
    data = path.read_bytes()
    _seal(path, {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()})
    verify_checkpoint(path)
    other = nn.Linear(3, 4)
    assert load_full(path, other)["epoch"] == 3
    assert torch.equal(other.weight, model.weight)

    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"one\.pt: expected sha256 \w{64}, found \w{64}"):
        load_full(path, other)


HASHES: dict[str, Callable[[dict[str, Any]], object]] = {
    "none": lambda entry: entry.pop("sha256"),
    "null": lambda entry: entry.update(sha256=None),
    "a number": lambda entry: entry.update(sha256=7),
    "an unknown algorithm": lambda entry: entry.update(md5=entry.pop("sha256")),
    "two algorithms": lambda entry: entry.update(blake3=entry["sha256"]),
}


@pytest.mark.parametrize("what", HASHES)
def test_a_manifest_cannot_switch_the_check_of_a_file_off(what: str, checkpoint: Path) -> None:
    content = sha256_of(checkpoint)
    HASHES[what](content["files"]["__0_0.distcp"])
    write_by_hand(checkpoint, content)
    refused(checkpoint, r"manifest\.json: .*, found no hash by blake3 or sha256 in \{.* for the file '__0_0")


@pytest.mark.parametrize("what", HASHES)
def test_a_manifest_needs_a_known_hash_of_its_own(what: str, checkpoint: Path) -> None:
    write_by_hand(checkpoint, sha256_of(checkpoint))
    content = json.loads((checkpoint / MANIFEST).read_text())
    HASHES[what](content)
    (checkpoint / MANIFEST).write_text(json.dumps(content))
    refused(checkpoint, r"manifest\.json: expected the manifest .* its hash, by blake3 or sha256, found none")


@pytest.mark.parametrize("algorithm", ["blake3", "sha256"])
@pytest.mark.parametrize("value", ["", "0" * 64])
def test_a_hash_that_is_another_or_empty_does_not_match(value: str, algorithm: str, checkpoint: Path) -> None:
    content = sha256_of(checkpoint)
    entry = content["files"]["__0_0.distcp"]
    content["files"]["__0_0.distcp"] = {"bytes": entry["bytes"], algorithm: value}
    write_by_hand(checkpoint, content)
    refused(checkpoint, rf"__0_0\.distcp: expected {algorithm} {value}, found \w{{64}}")


def test_a_hash_of_the_beginning_of_a_file_is_not_one_of_the_file(tmp_path: Path) -> None:
    """A seal that fits the archive before it, and another archive between the two, which torch.load reads."""
    first = save_full(tmp_path / "first.pt", nn.Linear(3, 4))
    content = torch.load(first, weights_only=True)
    torch.save(content, first)
    content["model"] = {name: tensor + 1 for name, tensor in content["model"].items()}
    second = tmp_path / "second.pt"
    torch.save(content, second)
    seal = {"bytes": first.stat().st_size, ALGORITHM: manifest.hash_file(first)}
    joined = tmp_path / "joined.pt"
    joined.write_bytes(first.read_bytes() + second.read_bytes())
    _seal(joined, seal)
    with pytest.raises(CheckpointError, match=r"joined\.pt: expected \d+ bytes before the hash, found \d+"):
        load_full(joined, nn.Linear(3, 4))
    with pytest.raises(CheckpointError, match="bytes before the hash"):
        verify_checkpoint(joined)


@pytest.mark.parametrize("what", HASHES)
def test_a_file_cannot_switch_its_check_off(what: str, tmp_path: Path) -> None:
    path = save_full(tmp_path / "one.pt", nn.Linear(3, 4))
    torch.save(torch.load(path, weights_only=True), path)  # without the seal
    seal = {"bytes": path.stat().st_size, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
    HASHES[what](seal)
    _seal(path, seal)
    with pytest.raises(CheckpointError, match=r"ends with its hash, by blake3 or sha256, found none in its"):
        load_full(path, nn.Linear(3, 4))


# ---- files that are none, and files that grow --------------------------------------------------------------


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes that have a name")
@pytest.mark.parametrize("name", [".metadata", MANIFEST, "__0_0.distcp"])
def test_a_pipe_in_the_place_of_a_file_is_refused(name: str, checkpoint: Path) -> None:
    (checkpoint / name).unlink()
    os.mkfifo(checkpoint / name)
    refused(checkpoint, f"{name}: expected a file, found a directory, a pipe or a device")


def archive(
    pickled: bytes, parts: dict[str, bytes] | None = None, *, compression: int = zipfile.ZIP_STORED
) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", compression) as written:
        for name, content in {"data.pkl": pickled, **(parts or {})}.items():
            written.writestr(f"archive/{name}", content)
    return file.getvalue()


BOMBS = {
    "a size in place of bytes": archive(b"\x80\x02cbuiltins\nbytearray\n" + b"J\0\0\0\x7f\x85R."),
    "a tensor of a size": archive(b"\x80\x02ctorch\nTensor\n" + b"J\0\0\0\x7f\x85R."),
    "one that is called in another's name": archive(
        b"\x80\x02ctorch._tensor\n_rebuild_from_type_v2\n(cbuiltins\nbytearray\nNJ\0\0\0\x7f\x85}tR."
    ),
    "what was compressed": archive(
        pickle.dumps("x" * 2**20, 2), {"more": bytes(2**20)}, compression=zipfile.ZIP_DEFLATED
    ),
    "a key of keys": archive(b"\x80\x02}" + b")" + b"\x85" * 200_000 + b"K\x01s."),
    "a size under an older name": archive(b"\x80\x02c__builtin__\nbytearray\n" + b"J\0\0\0\x7f\x85R."),
    "a key that torch hashes": archive(
        b"\x80\x02}" + named("torch.distributed.tensor._dtensor_spec", "TensorMeta")
        + ENDLESS + b"K\x01K\x01\x87\x81K\x01s."
    ),
    "a key of keys in a dict of another kind": archive(
        b"\x80\x02cUserDict\nOrderedDict\n)R" + b")" + b"\x85" * 200_000 + b"K\x01s."
    ),
    "a storage beyond its end": archive(
        b"\x80\x02(X\x07\0\0\0storagectorch\nFloatStorage\n"
        b"X\x01\0\0\x000X\x03\0\0\0cpuM\0\x10tQ.",
        {"data/0": bytes(16)},
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", BOMBS)
def test_plain_data_takes_no_more_than_its_bytes(what: str) -> None:
    with pytest.raises(Refused):
        unpack(BOMBS[what])


def test_a_forged_file_is_refused_before_it_is_walked_through(tmp_path: Path) -> None:
    save_full(tmp_path / "a.pt", nn.Linear(2, 2), x=[1])
    content = torch.load(tmp_path / "a.pt", weights_only=True)
    inner: dict[str, Any] = {}
    for _ in range(60):  # 2 ** 60 ways to the innermost
        inner = {"a": inner, "b": inner}
    counted: dict[str, Any] = {"state": {}, "param_groups": [{"params": []}]}
    for name, value in (
        ("optimizer", {"state": inner, "param_groups": []}),
        ("optimizer", {**counted, "group_counts": [1, 1]}),
        ("optimizer", {**counted, "group_counts": [2, -1]}),
        ("optimizer", {**counted, "group_counts": "11"}),
        ("about", {}),
        ("tied", []),
    ):
        reseal(tmp_path / "b.pt", {**content, name: value})
        with pytest.raises(CheckpointError, match=r"b\.pt: expected what save_full writes, found"):
            verify_checkpoint(tmp_path / "b.pt")
        with pytest.raises(CheckpointError, match=r"b\.pt: expected what save_full writes, found"):
            load_full(tmp_path / "b.pt", nn.Linear(2, 2))


def test_a_checkpoint_that_goes_while_it_is_verified_is_told(checkpoint: Path) -> None:
    with pytest.raises(CheckpointError, match="expected"):
        verify_checkpoint(checkpoint, progress=lambda count: shutil.rmtree(checkpoint, ignore_errors=True))


# ---- two programs in one place -----------------------------------------------------------------------------


def hold(directory: Path, ready: Any, end: Any) -> None:
    begin(directory, 7)
    ready.set()
    end.wait(60)
    os._exit(0)


def test_a_description_that_is_mostly_a_hole_is_refused_before_it_is_read(checkpoint: Path) -> None:
    """As large as a disk, and takes none of it."""
    os.truncate(checkpoint / ".metadata", 3 << 30)
    before = psutil.Process().memory_info().rss
    with pytest.raises(CheckpointError, match="expected at most 536870912 bytes, found 3221225472"):
        read_metadata(checkpoint)
    assert psutil.Process().memory_info().rss - before < 1 << 28


def test_no_bit_of_the_hash_at_the_end_of_a_file_can_flip(tmp_path: Path) -> None:
    path = save_full(tmp_path / "one.pt", nn.Linear(2, 2))
    content = path.read_bytes()
    for place in range(content.rindex(b'{"format"'), len(content)):
        for bit in range(8):
            flipped = bytearray(content)
            flipped[place] ^= 1 << bit
            path.write_bytes(flipped)
            with pytest.raises(CheckpointError, match=r"one\.pt: expected"):
                verify_checkpoint(path)


def test_two_programs_do_not_save_into_one_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    context = multiprocessing.get_context("forkserver")
    ready, end = context.Event(), context.Event()
    other = context.Process(target=hold, args=(tmp_path, ready, end))
    other.start()
    assert ready.wait(60)
    (theirs,) = tmp_path.glob(".saving-*-step-7")
    monkeypatch.setattr(commit, "_LOCK_WAIT_S", 0.2)
    with pytest.raises(
        CheckpointError, match=rf"only program that saves there, found process {other.pid} on"
    ):
        save_distributed(tmp_path, nn.Linear(2, 2), step=1)
    assert theirs.is_dir(), "what another program was writing has gone"
    other.kill()  # it does not get to clean up
    other.join(60)
    save_distributed(tmp_path, nn.Linear(2, 2), step=1)
    assert [path.name for path in tmp_path.iterdir()] == ["000001-step-1"]


def test_files_are_replaced_under_names_of_their_own(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("as it was")
    (tmp_path / ".saving-model.pt").symlink_to(tmp_path / "precious")
    one, other = NewFile(tmp_path / "model.pt"), NewFile(tmp_path / "model.pt")
    assert one.path != other.path  # and the second has not taken the first for a leftover
    for new, text in ((one, b"one"), (other, b"other")):
        with os.fdopen(new.descriptor(), "wb") as file:
            file.write(text)
        new.commit()
    assert (tmp_path / "model.pt").read_text() == "other"
    leftover = tmp_path / ".saving-00000000-model.pt"
    leftover.write_text("of a program that was killed")
    save_full(tmp_path / "model.pt", nn.Linear(2, 2))
    export_safetensors(tmp_path / "model.pt", tmp_path)
    assert (tmp_path / "precious").read_text() == "as it was"
    assert {path.name for path in tmp_path.iterdir()} == {
        ".saving-model.pt",
        "precious",
        "model.pt",
        "model.safetensors",
    }


@pytest.mark.parametrize("size", [-1, 0, float("nan"), float("inf")])
def test_shards_of_no_size_are_refused(size: float, checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="expected shard_gib to be above 0"):
        export_safetensors(checkpoint, tmp_path / "out", shard_gib=size)
    with pytest.raises(SystemExit, match="2"):
        main(["export", str(checkpoint), str(tmp_path / "out"), "--shard-gib", str(size)])
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("path", [("nothing", "x"), (), ("number", 0), ("text", 0), ("list", 5)], ids=str)
def test_a_sharded_tensor_without_a_place_is_refused_before_anything_is_loaded(
    path: tuple[Any, ...], tmp_path: Path
) -> None:
    model = nn.Linear(3, 4)
    save_full(tmp_path / "f.pt", model, number=1, text="abc", list=[1])
    content = torch.load(tmp_path / "f.pt")
    content["sharded"] = {"state.x": ((path, [0]), torch.ones(2))}
    reseal(tmp_path / "f.pt", content)
    other = nn.Linear(3, 4)
    before = other.weight.detach().clone()
    with pytest.raises(CheckpointError, match=r"expected a place in the saved state for 'state\.x'"):
        load_full(tmp_path / "f.pt", other)
    assert torch.equal(other.weight, before)
    with pytest.raises(CheckpointError, match=r"expected a place in the saved state for 'state\.x'"):
        verify_checkpoint(tmp_path / "f.pt")


@pytest.mark.parametrize(
    ("sharded", "told"),
    [
        ([], "found a list under 'sharded'"),
        ({"state.x": (("x",), [0])}, r"found a place .* for 'state\.x', which is no tensor of it"),
        ({"model.weight": ("x", [0])}, r"found no place in the state for 'model\.weight'"),
        ({"model.weight": (("x",), ["0"])}, r"found no dimensions that 'model\.weight' was sharded by"),
        ({"model.weight": (("x", "y"), [0])}, r"expected a place in the saved state for 'model\.weight'"),
    ],
)
def test_forged_places_of_sharded_tensors_are_refused_by_every_reader(
    sharded: Any, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(save_module, "pack", lambda value, what: pack({**value, "sharded": sharded}, what))
        checkpoint = save_distributed(tmp_path / "home", nn.Linear(3, 4), step=1, x=[1]).wait()
    refused(checkpoint, told)


@pytest.mark.parametrize(
    ("name", "more", "told"),
    [("more-{}", 0, "of more-__0_"), ("{}", 1 << 20, "of __0_")],
)
def test_a_description_that_points_to_other_bytes_is_refused(
    name: str, more: int, told: str, checkpoint: Path
) -> None:
    """The file without a hash would be read without a complaint: it holds the same."""
    for file in checkpoint.glob("*.distcp"):
        shutil.copy(file, checkpoint / f"more-{file.name}")
    edit_metadata(
        checkpoint,
        lambda metadata: metadata.storage_data.update(
            {
                index: dataclasses.replace(
                    info, relative_path=name.format(info.relative_path), offset=info.offset + more
                )
                for index, info in metadata.storage_data.items()
            }
        ),
    )
    refused(checkpoint, r"\.metadata: expected .* in a file of the manifest, found it at .* " + told)


def saved_archive(tensor: torch.Tensor, **changed: bytes) -> bytes:
    """As torch.save writes it, with other parts, and the pickle compressed if it is one of them."""
    plain, changes = io.BytesIO(), io.BytesIO()
    torch.save(tensor, plain)
    with zipfile.ZipFile(plain) as source, zipfile.ZipFile(changes, "w") as written:
        for entry in source.infolist():
            part = entry.filename.partition("/")[2]
            content = changed.get(part.replace(".", "_"), source.read(entry))
            kind = (
                zipfile.ZIP_DEFLATED if part == "data.pkl" and "data_pkl" in changed else zipfile.ZIP_STORED
            )
            if content:
                written.writestr(entry.filename, content, kind)
    return changes.getvalue()


def test_only_a_whole_tensor_of_this_machine_is_read() -> None:
    tensor = torch.arange(4.0).reshape(2, 2)
    other_order = b"big" if sys.byteorder == "little" else b"little"
    inside = zipfile.ZipFile(io.BytesIO(saved_archive(tensor)))
    pickled = inside.read(next(name for name in inside.namelist() if name.endswith("data.pkl")))
    cases = {
        "": saved_archive(tensor),
        "not even its byte order": saved_archive(tensor, byteorder=b""),
        "a part of another tensor": saved_archive(torch.arange(8.0)[:4].reshape(2, 2)),
        "part of another tensor": saved_archive(tensor.T),
        "-endian machine": saved_archive(tensor, byteorder=other_order),
        "the compressed part": saved_archive(tensor, data_pkl=pickled),
    }
    for number, (told, data) in enumerate(cases.items()):
        item = Item(Path("f"), 0, len(data), "x", torch.float32, torch.Size([2, 2]))
        file: Any = io.BytesIO(data)
        if number < 2:
            begin = find_bytes(item, file, {})
            assert data[begin : begin + 16] == view(tensor).tobytes()
        else:
            with pytest.raises(CheckpointError, match=f"expected x as .*found .*{told}"):
                find_bytes(item, file, {})


def test_what_holds_no_numbers_is_saved_and_verified(tmp_path: Path) -> None:
    model = nn.Embedding(0, 3)
    save_distributed(tmp_path, model, step=0)
    verify_checkpoint(tmp_path)
    load_distributed(tmp_path, model)


@pytest.mark.skipif(os.name == "nt", reason="no flock")
def test_a_lock_on_a_full_disk_is_a_lock_that_can_be_released(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "write", full)
        with contextlib.suppress(OSError):
            Lock(tmp_path / "lock").release()
    Lock(tmp_path / "lock").release()
