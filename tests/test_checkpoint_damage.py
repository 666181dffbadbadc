"""Damaged, mixed, foreign and malicious checkpoints: refused in words on every rank, nothing touched."""

import io
import json
import os
import pickle
import re
import shutil
from collections.abc import Callable
from contextlib import suppress
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.fsdp import fully_shard

from fsdp_utils import (
    CheckpointError,
    load_distributed,
    load_full,
    run_on_ranks,
    save_distributed,
    save_full,
    verify_checkpoint,
)
from fsdp_utils.checkpoint.full import _seal
from fsdp_utils.checkpoint.manifest import ALGORITHM, MANIFEST, committed, hash_file, write_manifest
from fsdp_utils.checkpoint.metadata import read_metadata
from tests.checkpoints import Data, Net, Outcome, build, fingerprint, outcome, rank, train

SECONDS = 10  # in which an error must be told; far less on an idle machine


class Fault(NamedTuple):
    inflict: Callable[
        [Path, Path], object
    ]  # on a copy of the checkpoint; the second path is one of another step
    told: str  # regular expression: what the error says


def shard(checkpoint: Path, number: int = 0) -> Path:
    return sorted(checkpoint.glob("*.distcp"))[number]


def flip(path: Path, place: float = 0.5) -> None:
    """One bit."""
    data = bytearray(path.read_bytes())
    data[int(len(data) * place)] ^= 1
    path.write_bytes(data)


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def swap(one: Path, other: Path) -> None:
    between = one.with_suffix(".between")
    one.rename(between)
    other.rename(one)
    between.rename(other)


class OldPickler(pickle.Pickler):
    """Pickles members of an enum as Python 3.11.2 does."""

    def reducer_override(self, value: Any) -> Any:
        return (getattr, (type(value), value.name)) if isinstance(value, Enum) else NotImplemented


class Attribute:
    """Asks for an attribute of something when it is unpickled."""

    def __reduce__(self) -> Any:
        return getattr, (torch.Size, "numel")


class Malicious:
    """Runs a command when it is unpickled."""

    def __init__(self, canary: Path) -> None:
        self.command = f"touch {canary}"

    def __reduce__(self) -> Any:
        return os.system, (self.command,)


def forge(checkpoint: Path) -> None:
    """Make the manifest agree with the files, as an attacker would."""
    manifest = json.loads((checkpoint / MANIFEST).read_text())
    del manifest[ALGORITHM]
    for name in manifest["files"]:
        path = checkpoint / name
        manifest["files"][name] = {"bytes": path.stat().st_size, ALGORITHM: hash_file(path)}
    write_manifest(checkpoint, manifest)


def malicious_metadata(checkpoint: Path, canary: Path) -> None:
    (checkpoint / ".metadata").write_bytes(pickle.dumps(Malicious(canary)))
    forge(checkpoint)


def malicious_metadata_of_a_rank(checkpoint: Path, canary: Path) -> None:
    (checkpoint / ".metadata").unlink()
    for number in range(2):
        (checkpoint / f"__{number}.metadata").write_bytes(pickle.dumps(Malicious(canary)))


def replace_item(checkpoint: Path, key: str, item: bytes, entry: Any = None) -> None:
    """Let the description point to another item for key, appended to its file."""
    metadata = pickle.loads((checkpoint / ".metadata").read_bytes())
    (index,) = (index for index in metadata.storage_data if index.fqn == key and not any(index.offset or ()))
    where = metadata.storage_data.pop(index)
    path = checkpoint / where.relative_path
    where.offset, where.length = path.stat().st_size, len(item)
    with path.open("ab") as file:
        file.write(item)
    if entry is not None:
        index = type(index)(key)
        metadata.state_dict_metadata[key] = entry
    metadata.storage_data[index] = where
    (checkpoint / ".metadata").write_bytes(pickle.dumps(metadata))
    forge(checkpoint)


def saved(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def malicious_plain_data(checkpoint: Path, canary: Path) -> None:
    """The bytes that are to hold plain data hold a pickle that does something."""
    evil = torch.frombuffer(bytearray(saved(Malicious(canary))), dtype=torch.uint8)
    chunk = ChunkStorageMetadata(torch.Size([0]), evil.shape)
    entry = TensorStorageMetadata(TensorProperties(torch.uint8), evil.shape, [chunk])
    replace_item(checkpoint, "plain", saved(evil), entry)
    metadata = pickle.loads((checkpoint / ".metadata").read_bytes())
    (index,) = (index for index in metadata.storage_data if index.fqn == "plain")
    metadata.storage_data[MetadataIndex("plain", [0])] = metadata.storage_data.pop(index)
    (checkpoint / ".metadata").write_bytes(pickle.dumps(metadata))
    forge(checkpoint)


def malicious_object(checkpoint: Path, canary: Path) -> None:
    """Where a tensor is to be, an object in the form that DCP unpickles."""
    replace_item(checkpoint, "plain", saved(Malicious(canary)), BytesStorageMetadata())


def malicious_tensor(checkpoint: Path, canary: Path) -> None:
    """In the place of a tensor, a pickle that does something."""
    replace_item(checkpoint, "model.embed.weight", saved(Malicious(canary)))


def outside(checkpoint: Path, _: Path) -> None:
    """The description points to a file that is none of the checkpoint's."""
    metadata = pickle.loads((checkpoint / ".metadata").read_bytes())
    for where in metadata.storage_data.values():
        where.relative_path = f"../{checkpoint.name}/{where.relative_path}"
    (checkpoint / ".metadata").write_bytes(pickle.dumps(metadata))
    forge(checkpoint)


def another_layout(checkpoint: Path, _: Path) -> None:
    """The description takes two ranks' parts of a tensor for each other's."""
    path = checkpoint / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    one, other = (index for index in metadata.storage_data if index.fqn == "model.embed.weight")
    data = metadata.storage_data
    data[one], data[other] = data[other], data[one]
    path.write_bytes(pickle.dumps(metadata))


def edit_manifest(checkpoint: Path, old: str, new: str) -> None:
    text = (checkpoint / MANIFEST).read_text()
    assert old in text
    (checkpoint / MANIFEST).write_text(text.replace(old, new, 1))


FAULTS = {
    "truncated shard": Fault(lambda c, o: cut(shard(c)), r"/__0_0.*\.distcp: expected \d+ bytes, found \d+"),
    "missing shard": Fault(
        lambda c, o: shard(c, -1).unlink(), r"/__1_0.*\.distcp: expected a file of \d+ bytes"
    ),
    "bit flip": Fault(lambda c, o: flip(shard(c)), r"/__0_0.*\.distcp: expected blake3 \w{64}, found \w{64}"),
    "bit flip at the end": Fault(lambda c, o: flip(shard(c, -1), 0.9999), r"/__1_0.*: expected blake3"),
    "bit flip in .metadata": Fault(lambda c, o: flip(c / ".metadata"), r"/\.metadata: expected blake3"),
    "swapped shards": Fault(lambda c, o: swap(shard(c), shard(c, -1)), r"\.distcp: expected .*, found"),
    "shard of another step": Fault(
        lambda c, o: shutil.copy(shard(o), shard(c)), r"/__0_0.*\.distcp: expected blake3"
    ),
    ".metadata of another layout": Fault(another_layout, r"/\.metadata: expected blake3"),
    "manifest of another step": Fault(
        lambda c, o: shutil.copy(o / MANIFEST, c / MANIFEST), r": expected blake3"
    ),
    "truncated manifest": Fault(
        lambda c, o: cut(c / MANIFEST), r"manifest\.json: expected .*, found a damaged"
    ),
    "empty manifest": Fault(lambda c, o: os.truncate(c / MANIFEST, 0), r"manifest\.json: .* found a damaged"),
    "missing manifest": Fault(
        lambda c, o: (c / MANIFEST).unlink(), r"manifest\.json: expected .* found no file"
    ),
    "edited manifest": Fault(
        lambda c, o: edit_manifest(c, '"step": 1', '"step": 5'),
        r"manifest\.json: .* blake3 \w{64}, found \w{64}",
    ),
    "truncated .metadata": Fault(
        lambda c, o: cut(c / ".metadata"), r"/\.metadata: expected \d+ bytes, found \d+"
    ),
    "missing .metadata": Fault(lambda c, o: (c / ".metadata").unlink(), r"/\.metadata: expected a file of"),
    "truncated .metadata, forged": Fault(
        lambda c, o: (cut(c / ".metadata"), forge(c)), r"/\.metadata: expected DCP's description"
    ),
    "description of another place": Fault(outside, r"/\.metadata: .* outside of the checkpoint"),
    "malicious .metadata": Fault(malicious_metadata, r"/\.metadata: .* it names posix\.system"),
    "malicious getattr": Fault(
        lambda c, o: ((c / ".metadata").write_bytes(pickle.dumps(Attribute())), forge(c)),
        r"/\.metadata: .* it names builtins\.getattr for something else",
    ),
    "malicious .metadata of each rank": Fault(
        malicious_metadata_of_a_rank, r"/\.metadata: expected a file of"
    ),
    "malicious plain data": Fault(malicious_plain_data, r"plain data under 'plain', found .*posix\.system"),
    "malicious object": Fault(malicious_object, r"expected a tensor 'plain', found BytesStorageMetadata"),
}


def load_all(folder: Path, canary: Path) -> dict[str, Any]:
    """Inflict each fault on a copy and load it. Returns the outcome, and whether anything was touched."""
    (model, optimizer), data = build("fsdp2"), Data()
    home = folder / "good"
    for step in (1, 2):
        train(model, optimizer, data, 1)
        save_distributed(home, model, optimizer, step=step, data=data.generator.get_state(), rank=rank())
    model, optimizer = build("fsdp2", seed=1)
    train(model, optimizer, data, 2)
    untouched = fingerprint(model, optimizer)

    found = {}
    for name, fault in FAULTS.items():
        copy = folder / name
        if rank() == 0:
            shutil.copytree(home, copy)
            first, second = (one.path for one in committed(copy))
            fault.inflict(first, second if "malicious" not in name else canary)
        dist.barrier()
        result = outcome(lambda copy=copy: load_distributed(copy, model, optimizer, step=1))
        found[name] = (result, fingerprint(model, optimizer) == untouched)
    # ... and after all that the good one still loads
    load_distributed(home, model, optimizer, step=1)
    assert fingerprint(model, optimizer) != untouched
    return found


@pytest.fixture(scope="module")
def damaged(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("damaged")
    return folder, run_on_ranks(load_all, folder, folder / "canary", timeout=110)


@pytest.mark.parametrize("name", FAULTS)
def test_a_damaged_checkpoint_is_refused(name: str, damaged: tuple[Path, list[dict[str, Any]]]) -> None:
    folder, found = damaged
    outcomes: list[Outcome] = [by_name[name][0] for by_name in found]
    assert outcomes[0].error is not None
    assert outcomes[0].error == outcomes[1].error, "the ranks have other errors"
    assert re.search(FAULTS[name].told, outcomes[0].error), outcomes[0].error
    assert max(one.seconds for one in outcomes) < SECONDS
    assert all(by_name[name][1] for by_name in found), "a parameter or a state has changed"
    with pytest.raises(CheckpointError):
        verify_checkpoint(committed(folder / name)[0].path)
    assert not (folder / "canary").exists(), "something in the checkpoint was run"


def test_the_malicious_checkpoints_would_run_if_they_were_unpickled(
    damaged: tuple[Path, list[dict[str, Any]]], tmp_path: Path
) -> None:
    malicious_metadata(
        copy := shutil.copytree(committed(damaged[0] / "good")[0].path, tmp_path / "c"), tmp_path / "x"
    )
    with suppress(AttributeError):  # what the command returns is no description
        FileSystemReader(copy).read_metadata()
    assert (tmp_path / "x").exists()


def test_a_description_that_another_python_has_pickled_is_read(tmp_path: Path) -> None:
    properties = TensorProperties(torch.float32, memory_format=torch.channels_last)
    chunk = ChunkStorageMetadata(torch.Size([0]), torch.Size([3]))
    written = Metadata(
        {"x": TensorStorageMetadata(properties, torch.Size([3]), [chunk])},
        storage_data={MetadataIndex("x", [0]): _StorageInfo("__0_0.distcp", 0, 1000)},
    )
    with (tmp_path / ".metadata").open("wb") as file:
        OldPickler(file).dump(written)
    assert b"getattr" in (tmp_path / ".metadata").read_bytes()
    assert read_metadata(tmp_path) == written


def load_malicious_tensor(folder: Path, verify: bool) -> tuple[Outcome, bool]:
    model, optimizer = build("fsdp2")
    train(model, optimizer, Data(), 1)
    path = save_distributed(folder, model, optimizer, step=1).wait()
    if rank() == 0:
        malicious_tensor(path, folder / "canary")
    dist.barrier()
    before = fingerprint(model, optimizer)
    result = outcome(lambda: load_distributed(folder, model, optimizer, verify=verify))
    return result, fingerprint(model, optimizer) == before


@pytest.mark.parametrize("verify", [True, False])
def test_a_malicious_tensor_is_not_run(verify: bool, tmp_path: Path) -> None:
    (one, unchanged), (other, _) = run_on_ranks(load_malicious_tensor, tmp_path, verify)
    assert one.error == other.error
    assert one.error is not None
    assert "posix.system" in one.error
    assert not (tmp_path / "canary").exists()
    assert unchanged
    assert "partly loaded" not in one.error


def load_unverified(folder: Path) -> list[Outcome]:
    model, _ = build("fsdp2")
    path = save_distributed(folder, model, step=1).wait()
    if rank() == 0:
        metadata = pickle.loads((path / ".metadata").read_bytes())
        (where,) = (
            w for i, w in metadata.storage_data.items() if i.fqn == "model.embed.weight" and not any(i.offset)
        )
        item = bytearray((path / where.relative_path).read_bytes())
        values = item.index(model.embed.weight.to_local().detach().numpy().tobytes(), where.offset)
        item[values] ^= 1
        (path / where.relative_path).write_bytes(item)
    dist.barrier()
    return [
        outcome(lambda: load_distributed(folder, model, verify=False)),
        outcome(lambda: load_distributed(folder, model)),
    ]


def test_verifying_can_be_put_off_and_made_up_for(two_ranks: Any, tmp_path: Path) -> None:
    unverified, verified = two_ranks(load_unverified, tmp_path)[0]
    assert unverified.error is None
    assert verified.error is not None
    with pytest.raises(CheckpointError, match="expected blake3"):
        verify_checkpoint(tmp_path)


# ---- one file ------------------------------------------------------------------------------------------


def reseal(path: Path, content: Any) -> None:
    """Another content, with a hash that agrees with it."""
    torch.save(content, path)
    _seal(path, {"bytes": path.stat().st_size, ALGORITHM: hash_file(path)})


FULL_FAULTS = {
    "truncated": Fault(
        lambda c, o: cut(c), r"/truncated: expected a file that ends with its hash, .*, found none"
    ),
    "last byte missing": Fault(
        lambda c, o: os.truncate(c, c.stat().st_size - 1), r"expected .* its hash, .* found none"
    ),
    "missing": Fault(lambda c, o: c.unlink(), r"/missing: expected a file that save_full wrote, found none"),
    "bit flip": Fault(lambda c, o: flip(c), r"/bit flip: expected blake3 \w{64}, found \w{64}"),
    "bit flip in the hash": Fault(lambda c, o: flip(c, 0.9999), r"/bit flip in the hash: expected"),
    "malicious": Fault(
        lambda c, o: reseal(c, {"format": 1, "model": Malicious(o)}), r"not run: .*posix\.system"
    ),
    "of something else": Fault(
        lambda c, o: reseal(c, {"weight": torch.ones(2)}), r"found the entries \['weight'\]"
    ),
    "plain torch.save": Fault(
        lambda c, o: torch.save({"format": 1}, c), r"expected a file that ends with its hash"
    ),
}


def load_all_full(folder: Path, canary: Path) -> dict[str, Any]:
    (model, optimizer), data = build("fsdp2"), Data()
    train(model, optimizer, data, 1)
    good = save_full(folder / "good", model, optimizer)
    model, optimizer = build("fsdp2", seed=1)
    train(model, optimizer, data, 2)
    untouched = fingerprint(model, optimizer)
    found = {}
    for name, fault in FULL_FAULTS.items():
        if rank() == 0:
            shutil.copy(good, folder / name)
            fault.inflict(folder / name, canary)
        dist.barrier()
        result = outcome(lambda name=name: load_full(folder / name, model, optimizer))
        found[name] = (result, fingerprint(model, optimizer) == untouched)
    load_full(good, model, optimizer)
    assert fingerprint(model, optimizer) != untouched
    return found


@pytest.fixture(scope="module")
def damaged_files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("damaged_files")
    return folder, run_on_ranks(load_all_full, folder, folder / "canary")


@pytest.mark.parametrize("name", FULL_FAULTS)
def test_a_damaged_file_is_refused(name: str, damaged_files: tuple[Path, list[dict[str, Any]]]) -> None:
    folder, found = damaged_files
    outcomes: list[Outcome] = [by_name[name][0] for by_name in found]
    assert outcomes[0].error is not None
    assert outcomes[0].error == outcomes[1].error, "the ranks have other errors"
    assert re.search(FULL_FAULTS[name].told, outcomes[0].error), outcomes[0].error
    assert max(one.seconds for one in outcomes) < SECONDS
    assert all(by_name[name][1] for by_name in found), "a parameter or a state has changed"
    with pytest.raises(CheckpointError):
        verify_checkpoint(folder / name)
    assert not (folder / "canary").exists(), "something in the file was run"


# ---- it is whole, but of something else --------------------------------------------------------------------


class Other(nn.Module):
    """Another architecture: a name more, a name less, another shape."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 6)
        self.surplus = nn.Linear(2, 2)


def untied() -> nn.Module:
    model = Net()
    model.head.weight = nn.Parameter(torch.rand_like(model.head.weight))
    return model


def on_meta() -> nn.Module:
    with torch.device("meta"):
        return Net()


MISFITS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "another architecture": (
        Other,
        r"model\.embed\.weight: expected shape \[5, 6\] \(the model's\), found \[11, 6\] in the checkpoint\n"
        r".*model\.surplus\.weight: expected by the model, found nothing in the checkpoint\n"
        r"(.|\n)*in the checkpoint, expected by nothing in the model",
    ),
    "fp32 into bf16": (
        lambda: Net().bfloat16(),
        r"model\.\S+: expected torch\.bfloat16 \(the model's\), found torch\.float32 in the checkpoint; "
        r"cast=True",
    ),
    "another width": (lambda: Net(4), r"expected shape \[11, 4\] \(the model's\), found \[11, 6\]"),
    "parameters on meta": (on_meta, r"model\.embed\.weight: .* on the meta device; call model\.to_empty"),
}


def load_into_misfits(folder: Path) -> dict[str, list[tuple[Outcome, bool]]]:
    (model, optimizer), found = build("fsdp2"), {}
    save_distributed(folder / "d", model, optimizer, step=1)
    save_full(folder / "f", model, optimizer)
    for name, (make, _) in MISFITS.items():
        misfit = make()
        fully_shard(misfit)
        optimizer = torch.optim.AdamW(misfit.parameters())
        found[name] = []
        for load, path in ((load_distributed, folder / "d"), (load_full, folder / "f")):
            before = None if "meta" in name else fingerprint(misfit, optimizer)
            result = outcome(partial(load, path, misfit, optimizer))
            found[name].append((result, before is None or fingerprint(misfit, optimizer) == before))
    return found


@pytest.fixture(scope="module")
def misfits(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, list[tuple[Outcome, bool]]]]:
    return run_on_ranks(load_into_misfits, tmp_path_factory.mktemp("misfits"))


@pytest.mark.parametrize("name", MISFITS)
def test_a_checkpoint_of_another_model_is_refused(
    name: str, misfits: list[dict[str, list[tuple[Outcome, bool]]]]
) -> None:
    for (one, unchanged), (other, unchanged_there) in zip(*(found[name] for found in misfits), strict=True):
        assert one.error is not None
        assert one.error == other.error
        assert re.search(MISFITS[name][1], one.error), one.error
        assert unchanged
        assert unchanged_there


def test_two_tensors_are_not_loaded_into_tied_ones(tmp_path: Path) -> None:
    save_distributed(tmp_path, untied(), step=1)
    with pytest.raises(
        CheckpointError, match=r"expected one tensor under this name and 'embed\.weight' \(tied"
    ):
        load_distributed(tmp_path, Net())
    save_distributed(tmp_path, Net(), step=2)
    model: Any = untied()
    load_distributed(tmp_path, model)
    assert torch.equal(model.head.weight, model.embed.weight)


def test_an_optimizer_must_be_there_and_have_the_same_groups(tmp_path: Path) -> None:
    model, optimizer = build("none")
    save_distributed(tmp_path / "without", model, step=1)
    with pytest.raises(CheckpointError, match="expected the state of an optimizer, found none"):
        load_distributed(tmp_path / "without", model, optimizer)
    train(model, optimizer, Data(), 1)
    save_distributed(tmp_path / "with", model, optimizer, step=1)
    other = torch.optim.AdamW(model.parameters())
    with pytest.raises(
        CheckpointError, match=r"groups of \[13\] parameters, found \[12, 1\] in the checkpoint"
    ):
        load_distributed(tmp_path / "with", model, other)
    assert not other.state


def test_a_step_that_is_not_there_is_named_with_those_that_are(tmp_path: Path) -> None:
    model, _ = build("none")
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="found none"):
        load_distributed(tmp_path / "empty", model)
    with pytest.raises(CheckpointError, match="no such directory"):
        load_distributed(tmp_path / "nowhere", model)
    for step in (10, 20):
        save_distributed(tmp_path, model, step=step)
    with pytest.raises(
        CheckpointError, match="expected a checkpoint of step 15, found those of steps 10, 20"
    ):
        load_distributed(tmp_path, model, step=15)
