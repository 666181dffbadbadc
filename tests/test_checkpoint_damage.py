"""Damaged, exchanged and foreign checkpoints: refused in words on every rank, nothing changed."""

import ast
import os
import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import fsdp_utils
from fsdp_utils import export_safetensors, load_distributed, save_distributed, verify_checkpoint
from fsdp_utils.checkpoint import CheckpointError, checkpoints
from tests.checkpoints import Data, Net, Outcome, build, fingerprint, outcome, played, rank, train
from tests.on_ranks import case

SECONDS = 10  # in which an error must be told; far less on an idle machine
MANIFEST = "manifest.json"
PARTS = ("rank-00000.safetensors", "rank-00001.safetensors")
Happened = tuple[Path, dict[str, list[Any]]]  # a folder, and what each scene returned by rank

# ---- files -------------------------------------------------------------------------------------------------


def flip(path: Path, place: float = 0.5) -> None:
    """One bit."""
    data = bytearray(path.read_bytes())
    data[int(len(data) * place)] ^= 1
    path.write_bytes(data)


def exchange(one: Path, other: Path) -> None:
    content = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(content)


# what is done to a file, which has a copy from another step
DAMAGE: dict[str, Callable[[Path, Path], object]] = {
    "cut short": lambda path, _: os.truncate(path, path.stat().st_size // 2),
    "cut to nothing": lambda path, _: os.truncate(path, 0),
    "with more at its end": lambda path, _: path.write_bytes(path.read_bytes() + b"\0"),
    "missing": lambda path, _: path.unlink(),
    "with a bit flipped": lambda path, _: flip(path),
    "with its last bits flipped": lambda path, _: flip(path, 0.9999),
    "of another step": lambda path, other: shutil.copy(other, path),
}
# what is done to a checkpoint with another one, and the file that is named then
FAULTS: dict[str, tuple[Callable[[Path, Path], object], str]] = {
    f"{name} {what}": (lambda one, two, name=name, damage=damage: damage(one / name, two / name), name)
    for name in (*PARTS, MANIFEST)
    for what, damage in DAMAGE.items()
    if (name, what) != (MANIFEST, "of another step")
}
FAULTS["parts exchanged"] = (lambda one, _: exchange(one / PARTS[0], one / PARTS[1]), "rank-0000")
FAULTS["a part more"] = (lambda one, two: shutil.copy(two / PARTS[0], one / "rank-00002"), "rank-00002")
FAULTS["an edited manifest"] = (
    lambda one, _: (one / MANIFEST).write_text(
        (one / MANIFEST).read_text().replace('"step": 1', '"step": 5')
    ),
    MANIFEST,
)


def load_damaged(folder: Path) -> dict[str, Outcome]:
    """Inflict each fault on a copy and load it, which changes nothing."""
    (model, optimizer), data, home = build("fsdp2"), Data(), folder / "good"
    for step in (1, 2):
        train(model, optimizer, data, 1)
        state, own = {"mark": (1, 2), "at": step}, {"own": [rank(), step]}
        save_distributed(home, model, optimizer, step=step, state=state, per_rank=own)
    model, optimizer = build("fsdp2", seed=1)
    train(model, optimizer, data, 2)
    untouched = fingerprint(model, optimizer)
    found = {}
    for name, (inflict, _) in FAULTS.items():
        copy = folder / name
        if rank() == 0:
            shutil.copytree(home, copy)
            inflict(*checkpoints(copy).values())
        dist.barrier()
        found[name] = outcome(partial(load_distributed, copy, model, optimizer, step=1))
        assert fingerprint(model, optimizer) == untouched, name
    load_distributed(home, model, optimizer, step=1)  # after all that the good one still loads
    assert fingerprint(model, optimizer) != untouched
    return found


def test_a_damaged_checkpoint_is_refused(happened: Happened, tmp_path: Path) -> None:
    folder, by_scene = happened
    for name, (_, file) in FAULTS.items():
        with case(name):
            found, other = (one[name] for one in by_scene["load_damaged"])
            assert (found.error, found.kind) == (other.error, other.kind), "the ranks have other errors"
            assert re.search(rf"/{re.escape(file)}.*: expected .*found", str(found.error)), found.error
            assert found.kind == "CheckpointDamagedError"
            assert max(found.seconds, other.seconds) < SECONDS
        for call in (verify_checkpoint, lambda path: export_safetensors(path, tmp_path)):
            with pytest.raises(CheckpointError):
                call(folder / name / "000001-step-1")
    assert not list(tmp_path.iterdir())


# ---- whole, but not what was asked for ---------------------------------------------------------------------


def on_meta() -> nn.Module:
    with torch.device("meta"):
        return Net()


NONE, ERROR = "CheckpointNotFoundError", "CheckpointError"
ASKED: dict[str, tuple[dict[str, Any], str, str]] = {
    "no directory": ({"name": "nowhere"}, NONE, "no such directory"),
    "an empty directory": ({"name": "empty"}, NONE, "found none"),
    "no such step": ({"step": 15}, NONE, "expected a checkpoint of step 15, found those of steps 10, 20"),
    "a step of no kind": ({"step": -1.5}, ERROR, "expected step to be"),
    "parameters on meta": ({"make": on_meta}, ERROR, "on the meta device.*load_pretrained"),
    "no optimizer": (
        {"name": "model", "optimizer": torch.optim.AdamW},
        ERROR,
        r"expected optimizers with groups of \[13\] parameters, found \[\]",
    ),
}


def ask(
    folder: Path,
    name: str = "good",
    make: Callable[[], nn.Module] = Net,
    optimizer: Any = None,
    **options: Any,
) -> Outcome:
    """Load into a sharded model, which stays as it is."""
    model: Any = fully_shard(make())
    before = "" if make is on_meta else fingerprint(model)
    optimizer = optimizer and optimizer(model.parameters())
    told = outcome(lambda: load_distributed(folder / "asked" / name, model, optimizer, **options))
    assert make is on_meta or fingerprint(model) == before
    assert optimizer is None or not optimizer.state
    return told


def ask_all(folder: Path) -> dict[str, Outcome]:
    model, optimizer = build("fsdp2")
    train(model, optimizer, Data(), 1)
    for step in (10, 20):
        save_distributed(folder / "asked" / "good", model, optimizer, step=step)
    save_distributed(folder / "asked" / "model", model, step=1)
    (folder / "asked" / "empty").mkdir(exist_ok=True)
    dist.barrier()
    return {name: ask(folder, **given) for name, (given, *_) in ASKED.items()}


def test_what_is_not_there_is_told_by_class_and_text(happened: Happened) -> None:
    first, second = happened[1]["ask_all"]
    for name, (_, kind, text) in ASKED.items():
        assert (first[name].error, first[name].kind) == (second[name].error, second[name].kind)
        assert first[name].kind == kind, name
        assert re.search(text, str(first[name].error)), first[name].error


@pytest.fixture(scope="module")
def happened(tmp_path_factory: pytest.TempPathFactory) -> Happened:
    folder = tmp_path_factory.mktemp("damaged")
    return folder, played([load_damaged, ask_all], folder)


# ---- nothing is run ----------------------------------------------------------------------------------------

UNPICKLES = {"pickle", "_pickle", "cPickle", "dill", "cloudpickle", "shelve", "joblib", "marshal"}
CALLS = {"torch.load", "torch.save", "torch.jit.load", "torch.package", "np.load", "numpy.load"}
CALLS |= {"FileSystemReader", "FileSystemWriter", "dcp.load", "dcp.save", "dist_cp.load", "dist_cp.save"}
# What processes of one job, of one user, send each other.
BETWEEN_PROCESSES = {"distributed", "notebook"}


def names_used(tree: ast.AST) -> set[str]:
    nodes, found = list(ast.walk(tree)), set[str]()
    for node in nodes:
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names] + [getattr(node, "module", None) or ""]
            found |= {name.partition(".")[0] for name in names}
    found |= {str(node.value) for node in nodes if isinstance(node, ast.Constant)}
    return found | {ast.unparse(node) for node in nodes if isinstance(node, ast.Attribute | ast.Name)}


def test_no_file_is_pickled_or_unpickled() -> None:
    root = Path(fsdp_utils.__file__).parent
    for path in root.rglob("*.py"):
        among_processes = path.relative_to(root).parts[0] in BETWEEN_PROCESSES
        forbidden = CALLS if among_processes else CALLS | UNPICKLES
        assert not forbidden & names_used(ast.parse(path.read_text())), path
