"""Damaged, exchanged, forged and foreign checkpoints: refused in words on every rank, nothing changed."""

import ast
import json
import os
import re
import resource
import shutil
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import fsdp_utils
from benchmarks.attack_parts.forge import MANIFEST, forge_hashes, forge_header, forge_manifest, join, split
from fsdp_utils import export_safetensors, load_distributed, run_on_ranks, save_distributed, verify_checkpoint
from fsdp_utils.checkpoint import (
    CheckpointDamagedError,
    CheckpointError,
    CheckpointMismatchError,
    CheckpointNotFoundError,
    checkpoints,
)
from tests.checkpoints import Data, Net, build, fingerprint, rank, train

SECONDS = 10  # in which an error must be told; far less on an idle machine
PARTS = ("rank-00000.safetensors", "rank-00001.safetensors")
FILES = (*PARTS, "state.json", "rank-00001.json", MANIFEST)
MORE = "rank-00002.safetensors"
KEY = "model.embed.weight"  # 11 x 6: six rows on rank 0, five on rank 1


class Fault(NamedTuple):
    inflict: Callable[
        [Path, Path], object
    ]  # on a copy of a checkpoint; the second path is one of another step
    told: str = ": expected"  # regular expression: what the error says


# ---- files -------------------------------------------------------------------------------------------------


def flip(path: Path, place: float = 0.5) -> None:
    """One bit."""
    data = bytearray(path.read_bytes())
    data[int(len(data) * place)] ^= 1
    path.write_bytes(data)


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def replace(path: Path, make: Callable[[Path], object]) -> None:
    path.unlink()
    make(path)


def exchange(one: Path, other: Path) -> None:
    between = one.with_suffix(".between")
    one.rename(between)
    other.rename(one)
    between.rename(other)


def link(path: Path) -> None:
    moved = path.rename(path.parent.parent / "elsewhere")
    path.symlink_to(moved)


DAMAGE: dict[str, Callable[[Path], object]] = {
    "cut short": cut,
    "cut to nothing": lambda path: os.truncate(path, 0),
    "with more at its end": lambda path: path.write_bytes(path.read_bytes() + b"\0"),
    "missing": Path.unlink,
    "with a bit flipped": flip,
    "with its last bits flipped": lambda path: flip(path, 0.9999),
    "a pipe": lambda path: replace(path, os.mkfifo),
    "a directory": lambda path: replace(path, Path.mkdir),
    "a link": link,
    "a link to nothing": lambda path: replace(path, lambda path: path.symlink_to("nothing")),
}


def rows(
    where: str, told: str, inflict: Callable[[Path, Any], object], table: dict[str, Any]
) -> dict[str, Fault]:
    """A fault for each entry of a table."""
    return {
        f"{where} {what}": Fault(lambda c, o, entry=entry: inflict(c, entry), told)
        for what, entry in table.items()
    }


def one_more(checkpoint: Path, other: Path) -> None:
    shutil.copy(other / PARTS[0], checkpoint / MORE)


FAULTS: dict[str, Fault] = {
    "parts exchanged": Fault(
        lambda c, o: exchange(c / PARTS[0], c / PARTS[1]), r"/rank-0000\d\.\w+: expected"
    ),
    "a part more": Fault(one_more, f"/{MORE}: expected"),
    "a part more, forged": Fault(
        lambda c, o: (
            one_more(c, o),
            forge_manifest(c, lambda m: m["files"].update({MORE: m["files"][PARTS[0]]})),
            forge_hashes(c),
        ),
        "each element once",
    ),
    "an edited manifest": Fault(
        lambda c, o: (c / MANIFEST).write_text((c / MANIFEST).read_text().replace('"step": 1', '"step": 5')),
        r"manifest\.json: expected .* blake3 \w{64}, found \w{64}",
    ),
}
for name in FILES:
    FAULTS |= rows(name, rf"/{re.escape(name)}: expected .*found", lambda c, do, n=name: do(c / n), DAMAGE)
    FAULTS[f"{name} of another step"] = Fault(
        lambda c, o, name=name: shutil.copy(o / name, c / name), ": expected blake3"
    )


# ---- forged: every hash agrees -----------------------------------------------------------------------------


MANIFESTS: dict[str, Callable[[dict[str, Any]], object]] = {
    "without a step": lambda m: m.pop("step"),
    "without tensors": lambda m: m.pop("tensors"),
    "without files": lambda m: m.pop("files"),
    "a step that is text": lambda m: m.update(step="1"),
    "a step that is true": lambda m: m.update(step=True),
    "a step below 0": lambda m: m.update(step=-1),
    "of no ranks": lambda m: m.update(world_size=0),
    "files in a list": lambda m: m.update(files=list(m["files"])),
    "a file without a size": lambda m: m["files"][PARTS[0]].pop("bytes"),
    "no files": lambda m: m.update(files={}),
    "a file of a size that is true": lambda m: m["files"][PARTS[0]].update(bytes=True),
    "a file of a size below 0": lambda m: m["files"][PARTS[0]].update(bytes=-1),
    "a file elsewhere": lambda m: m["files"].update({"../x": m["files"].pop(PARTS[0])}),
    "a file that is the manifest": lambda m: m["files"].update({MANIFEST: m["files"][PARTS[0]]}),
    "a file without a hash": lambda m: m["files"][PARTS[0]].pop("blake3"),
    "a hash of null": lambda m: m["files"][PARTS[0]].update(blake3=None),
    "a hash that is a number": lambda m: m["files"][PARTS[0]].update(blake3=7),
    "a hash by another name": lambda m: m["files"][PARTS[0]].update(md5=m["files"][PARTS[0]].pop("blake3")),
    "an empty hash": lambda m: m["files"][PARTS[0]].update(blake3=""),
    "a hash of zeros": lambda m: m["files"][PARTS[0]].update(blake3="0" * 64),
    "a dtype that is a function": lambda m: m["tensors"][KEY].update(dtype="load"),
    "another dtype": lambda m: m["tensors"][KEY].update(dtype="int32"),
    "another shape": lambda m: m["tensors"][KEY].update(shape=[6, 11]),
    "a shape of text": lambda m: m["tensors"][KEY].update(shape=["11", "6"]),
    "a shape beyond measure": lambda m: m["tensors"][KEY].update(shape=[2**64]),
    "a tensor less": lambda m: m["tensors"].pop(KEY),
    "a tensor more": lambda m: m["tensors"].update({"model.more": m["tensors"][KEY]}),
    "of a later format": lambda m: m.update(format=99),
}
FAULTS |= rows("a manifest", ": expected", forge_manifest, MANIFESTS)
TEXTS = ("[" * 100_000, "[]", "null", "7" * 10_000, '{"blake3": []}', '{"blake3": ""}', '{"a": 1, "a": 2}')
FAULTS |= rows(
    "a manifest that is",
    r"manifest\.json: expected",
    lambda c, text: (c / MANIFEST).write_text(text),
    {text[:24]: text for text in TEXTS},
)

Header = dict[str, Any]
HEADERS: dict[str, Callable[[Header, Header], object]] = {
    "a dtype of another size": lambda h, p: h[KEY].update(dtype="F64"),
    "another dtype of that size": lambda h, p: h[KEY].update(dtype="I32"),
    "an unknown dtype": lambda h, p: h[KEY].update(dtype="F7"),
    "another shape of as many elements": lambda h, p: h[KEY].update(shape=[18, 2]),
    "another number of dimensions": lambda h, p: (
        h[KEY].update(shape=[36]),
        p[KEY].update(saved_offsets=[0]),
    ),
    "a size below 0": lambda h, p: h[KEY].update(shape=[-6, -6]),
    "a size of text": lambda h, p: h[KEY].update(shape=["6", 6]),
    "a size beyond measure": lambda h, p: h[KEY].update(shape=[2**70, 0], data_offsets=[0, 0]),
    "an overflowing size": lambda h, p: h[KEY].update(shape=[2**62, 4], data_offsets=[0, 0]),
    "bytes of another tensor": lambda h, p: h[KEY].update(
        data_offsets=h["optimizer.embed.weight.exp_avg"]["data_offsets"]
    ),
    "bytes beyond the end": lambda h, p: h[KEY].update(data_offsets=[10**9, 10**9 + 144]),
    "bytes backwards": lambda h, p: h[KEY].update(data_offsets=h[KEY]["data_offsets"][::-1]),
    "no bytes": lambda h, p: h[KEY].pop("data_offsets"),
    "one offset": lambda h, p: h[KEY].update(data_offsets=[0]),
    "dimensions without end": lambda h, p: h[KEY].update(shape=[6, 6] + [1] * 100_000),
    "true for a number": lambda h, p: h[KEY].update(shape=[True, 36]),
    "a dtype that is a list": lambda h, p: h[KEY].update(dtype=["F32"]),
    "a list for its metadata": lambda h, p: h.update(__metadata__=[]),
    "a chunk elsewhere": lambda h, p: p[KEY].update(saved_offsets=[1, 0]),
    "a chunk over another": lambda h, p: p[KEY].update(saved_offsets=[5, 0]),
    "a chunk before the tensor": lambda h, p: p[KEY].update(saved_offsets=[-1, 0]),
    "a place of other dimensions": lambda h, p: p[KEY].update(saved_offsets=[0]),
    "a place that is text": lambda h, p: p[KEY].update(saved_offsets="00"),
    "no place": lambda h, p: p.pop(KEY),
    "an entry that is a list": lambda h, p: h.update({KEY: list(h[KEY])}),
    "a tensor less": lambda h, p: (h.pop(KEY), p.pop(KEY)),
    "another name": lambda h, p: [one.update({"model.other": one.pop(KEY)}) for one in (h, p)],
}
FAULTS |= rows(
    "a header with",
    ": expected",
    lambda c, change: (forge_header(c / PARTS[0], change), forge_hashes(c)),
    HEADERS,
)


def forge_header_text(checkpoint: Path, change: Callable[[bytes], bytes]) -> None:
    header, tensors = split((checkpoint / PARTS[0]).read_bytes())
    (checkpoint / PARTS[0]).write_bytes(join(change(header), tensors))
    forge_hashes(checkpoint)


def forge_length(checkpoint: Path, length: int) -> None:
    content = (checkpoint / PARTS[0]).read_bytes()
    (checkpoint / PARTS[0]).write_bytes(length.to_bytes(8, "little") + content[8:])
    forge_hashes(checkpoint)


IN_PART = r"rank-00000\.safetensors: expected"
HEADER_TEXTS: dict[str, Callable[[bytes], bytes]] = {
    "no JSON": lambda text: text[:-20],
    "a list": lambda text: b"[]",
    "nested without end": lambda text: b"[" * 100_000,
    "with a name twice": lambda text: text.replace(b"{", b'{"%s": {}, ' % KEY.encode(), 1),
    "no text": lambda text: b"\xff" * 16,
}
FAULTS |= rows("a header that is", IN_PART, forge_header_text, HEADER_TEXTS)
FAULTS |= rows("a header that is long:", IN_PART, forge_length, {str(n): n for n in (0, 1, 2**40, 2**63)})


def array(dtype: str, shape: list[int], data: str) -> dict[str, Any]:
    return {"!": "numpy", "value": {"dtype": dtype, "shape": shape, "data": data}}


MARK = {"!": "tuple", "value": [1, 2]}  # (1, 2) in state.json
VALUES: dict[str, Any] = {
    "an unknown kind": {"!": "function", "value": "os.system"},
    "no value": {"!": "tuple"},
    "a tuple of a number": {"!": "tuple", "value": 7},
    "a number of no digits": {"!": "int", "value": "0x"},
    "a float of too few bits": {"!": "float", "value": "00"},
    "bytes that are none": {"!": "bytes", "value": "*"},
    "a dtype that is a function": {"!": "dtype", "value": "load"},
    "an unknown device": {"!": "device", "value": "nowhere"},
    "a tensor that is nowhere": {"!": "tensor", "value": "state.nowhere"},
    "a list as a key": {"!": "dict", "value": [[[], 1]]},
    "an array of objects": array("|O", [1], "AAAAAAAAAAA="),
    "an array of more than its bytes": array("<f8", [2**40], ""),
}


def forge_state(checkpoint: Path, old: str, new: str) -> None:
    text = json.dumps(json.loads((checkpoint / "state.json").read_text()))
    assert old in text
    (checkpoint / "state.json").write_text(text.replace(old, new))
    forge_hashes(checkpoint)


STATES = {what: (json.dumps(MARK), json.dumps(value)) for what, value in VALUES.items()} | {
    "lists without end": (json.dumps(MARK), "[" * 100_000 + "]" * 100_000),
    "a name twice": ('{"!": "tuple", ', '{"!": "list", "!": "tuple", '),
}
FAULTS |= rows("in the state", r"state\.json: expected", lambda c, pair: forge_state(c, *pair), STATES)
FAULTS |= rows(
    "a state that is",
    "expected",
    lambda c, text: ((c / "state.json").write_text(text), forge_hashes(c)),
    {text: text for text in ("[]", "null", "{}", '"x"')},
)


class Found(NamedTuple):
    """How a load ended on one rank."""

    kind: str
    error: str
    unchanged: bool
    seconds: float


def load_all(folder: Path) -> dict[str, Found]:
    """Inflict each fault on a copy and load it."""
    (model, optimizer), data = build("fsdp2"), Data()
    home = folder / "good"
    for step in (1, 2):
        train(model, optimizer, data, 1)
        state, own = {"mark": (1, 2), "at": step}, {"own": [rank(), step]}
        save_distributed(home, model, optimizer, step=step, state=state, per_rank=own)
    model, optimizer = build("fsdp2", seed=1)
    train(model, optimizer, data, 2)
    untouched = fingerprint(model, optimizer)

    found = {}
    for name, fault in FAULTS.items():
        copy = folder / name.replace("/", "|")
        if rank() == 0:
            shutil.copytree(home, copy)
            fault.inflict(*checkpoints(copy).values())
        dist.barrier()
        before, begun = fingerprint(model, optimizer), time.monotonic()
        try:
            load_distributed(copy, model, optimizer, step=1)
            kind, text = "none", "loaded"
        except CheckpointError as error:
            kind, text = type(error).__name__, str(error)
        seconds = time.monotonic() - begun
        found[name] = Found(kind, text, fingerprint(model, optimizer) == before, seconds)
    load_distributed(home, model, optimizer, step=1)  # after all that the good one still loads
    assert fingerprint(model, optimizer) != untouched
    return found


@pytest.fixture(scope="module")
def damaged(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Found]]]:
    folder = tmp_path_factory.mktemp("damaged")
    return folder, run_on_ranks(load_all, folder, timeout=110)


@pytest.mark.parametrize("name", FAULTS)
def test_a_damaged_checkpoint_is_refused(
    name: str, damaged: tuple[Path, list[dict[str, Found]]], tmp_path: Path
) -> None:
    folder, by_rank = damaged
    found, other = (one[name] for one in by_rank)
    assert found.error == other.error, "the ranks have other errors"
    assert re.search(FAULTS[name].told, found.error), found.error
    assert found.kind == other.kind == ("CheckpointError" if "format" in name else "CheckpointDamagedError")
    assert found.unchanged, "a parameter or a state has changed"
    assert other.unchanged, "a parameter or a state has changed"
    assert max(found.seconds, other.seconds) < SECONDS
    checkpoint = folder / name.replace("/", "|") / "000001-step-1"
    if name.startswith("a state that is"):
        return  # to be taken for what it is only by what needs it
    for call in (verify_checkpoint, lambda path: export_safetensors(path, tmp_path)):
        with pytest.raises(CheckpointError):
            call(checkpoint)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", [PARTS[0], "state.json", MANIFEST])
def test_a_file_that_is_mostly_a_hole_is_refused_before_it_is_read(name: str, tmp_path: Path) -> None:
    """As large as a disk, and takes none of it."""
    path, size = save_distributed(tmp_path, nn.Linear(2, 2), step=1).wait(), 3 << 30
    os.truncate(path / name, size)
    if name != MANIFEST:
        forge_manifest(path, lambda content: content["files"][name].update(bytes=size))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(CheckpointDamagedError, match=f"{name}: expected .*{size}"):
        load_distributed(tmp_path, nn.Linear(2, 2), verify=False)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 18  # KiB


def test_verifying_can_be_put_off_and_made_up_for(tmp_path: Path) -> None:
    path = save_distributed(tmp_path, nn.Linear(2, 2), step=1).wait()
    flip(path / PARTS[0], 0.9999)
    load_distributed(tmp_path, nn.Linear(2, 2), verify=False)
    for check in (lambda: load_distributed(tmp_path, nn.Linear(2, 2)), lambda: verify_checkpoint(tmp_path)):
        with pytest.raises(CheckpointDamagedError, match="expected blake3"):
            check()


def test_no_bit_of_a_manifest_can_flip(tmp_path: Path) -> None:
    path = save_distributed(tmp_path, nn.Linear(2, 2, bias=False), step=1).wait() / MANIFEST
    content = path.read_bytes()
    for place in range(len(content)):
        for bit in (0, 1, 3, 5) if place < len(content) - 100 else range(8):
            flipped = bytearray(content)
            flipped[place] ^= 1 << bit
            path.write_bytes(flipped)
            with pytest.raises(CheckpointError, match=r"manifest\.json: expected"):
                verify_checkpoint(tmp_path)


def test_what_holds_no_numbers_is_saved_and_verified(tmp_path: Path) -> None:
    save_distributed(tmp_path, nn.Embedding(0, 3), step=0)
    verify_checkpoint(tmp_path)
    load_distributed(tmp_path, nn.Embedding(0, 3))


# ---- whole, but not what was asked for ---------------------------------------------------------------------


class Other(nn.Module):
    """Another architecture: a name more, names less, another shape."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 6)
        self.surplus = nn.Linear(2, 2)


def on_meta() -> nn.Module:
    with torch.device("meta"):
        return Net()


def load(folder: Path, name: str = "good", make: Callable[[], nn.Module] = Net, **options: Any) -> str:
    """Load into a sharded model; says whether it was changed."""
    model = make()
    fully_shard(model)
    before = None if make is on_meta else fingerprint(model)
    optimizer = torch.optim.AdamW(model.parameters()) if options.pop("optimizer", False) else None
    try:
        load_distributed(folder / name, model, optimizer, **options)
    finally:
        if before is not None:
            assert fingerprint(model) == before
            assert optimizer is None or not optimizer.state
    return "loaded"


Asked = tuple[Callable[[Path], object], type[CheckpointError], str]
ASKED: dict[str, Asked] = {
    "no directory": (partial(load, name="nowhere"), CheckpointNotFoundError, "no such directory"),
    "an empty directory": (partial(load, name="empty"), CheckpointNotFoundError, "found none"),
    "no such step": (
        partial(load, step=15),
        CheckpointNotFoundError,
        "expected a checkpoint of step 15, found those of steps 10, 20",
    ),
    "a step of no kind": (partial(load, step=-1.5), CheckpointError, "expected step to be"),
    "one rank elsewhere": (
        lambda folder: load(folder, ("good", "empty")[rank()]),
        CheckpointError,
        "expected the same directory on all ranks",
    ),
    "another architecture": (
        partial(load, make=Other),
        CheckpointMismatchError,
        r"(?s)embed\.weight: expected shape \[5, 6\] .*found \[11, 6\].*surplus\.weight: expected",
    ),
    "another width": (
        partial(load, make=lambda: Net(4)),
        CheckpointMismatchError,
        r"expected shape \[11, 4\] .*, found \[11, 6\]",
    ),
    "another dtype": (
        partial(load, make=lambda: Net().bfloat16()),
        CheckpointMismatchError,
        r"(?s)torch\.bfloat16.*torch\.float32.*cast=True",
    ),
    "parameters on meta": (
        partial(load, make=on_meta),
        CheckpointMismatchError,
        "on the meta device.*load_pretrained",
    ),
    "no optimizer": (
        partial(load, name="model", optimizer=True),
        CheckpointMismatchError,
        "expected the state of an optimizer, found none",
    ),
    "no such state": (
        lambda folder: load(folder, state={"other": nn.Linear(2, 2)}),
        CheckpointMismatchError,
        "other",
    ),
}


def ask_all(folder: Path) -> dict[str, tuple[str, str]]:
    model, optimizer = build("fsdp2")
    train(model, optimizer, Data(), 1)
    for step in (10, 20):
        save_distributed(folder / "good", model, optimizer, step=step)
    save_distributed(folder / "model", model, step=1)
    (folder / "empty").mkdir(exist_ok=True)
    dist.barrier()
    found = {}
    for name, (ask, *_) in ASKED.items():
        with pytest.raises(CheckpointError) as caught:
            ask(folder)
        found[name] = type(caught.value).__name__, str(caught.value)
    return found


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, tuple[str, str]]]:
    return run_on_ranks(ask_all, tmp_path_factory.mktemp("asked"))


@pytest.mark.parametrize("name", ASKED)
def test_what_is_not_there_is_told_by_class_and_text(
    name: str, asked: list[dict[str, tuple[str, str]]]
) -> None:
    assert asked[0][name] == asked[1][name]
    kind, text = asked[0][name]
    assert kind == ASKED[name][1].__name__, text
    assert re.search(ASKED[name][2], text), text


# ---- nothing is run ----------------------------------------------------------------------------------------

UNPICKLES = {
    "pickle",
    "_pickle",
    "cPickle",
    "dill",
    "cloudpickle",
    "shelve",
    "joblib",
    "marshal",
    "jsonpickle",
}
CALLS = {
    "torch.load",
    "torch.save",
    "torch.jit.load",
    "torch.package",
    "np.load",
    "numpy.load",
    "pd.read_pickle",
}
CALLS |= {"FileSystemReader", "FileSystemWriter", "dcp.load", "dcp.save", "dist_cp.load", "dist_cp.save"}
# What processes of one job, of one user, send each other.
BETWEEN_PROCESSES = {"distributed", "notebook"}


def names_used(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield (node.module or "").partition(".")[0]
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.Attribute):
            yield ast.unparse(node)
        elif isinstance(node, ast.Constant | ast.Name):
            yield str(node.value) if isinstance(node, ast.Constant) else node.id


def test_no_file_is_pickled_or_unpickled() -> None:
    root = Path(fsdp_utils.__file__).parent
    found: dict[str, set[str]] = {}
    for path in root.rglob("*.py"):
        where = path.relative_to(root)
        forbidden = CALLS if where.parts[0] in BETWEEN_PROCESSES else CALLS | UNPICKLES
        if used := forbidden & set(names_used(ast.parse(path.read_text()))):
            found[str(where)] = used
    assert found == {}
