"""Damaged, exchanged and foreign checkpoints: refused in words on every rank, nothing changed."""

import ast
import os
import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import fsdp_utils
from fsdp_utils import export_safetensors, load_distributed, run_on_ranks, save_distributed, verify_checkpoint
from fsdp_utils.checkpoint import CheckpointError, checkpoints
from tests.checkpoints import Data, Net, Outcome, build, fingerprint, outcome, rank, train

SECONDS = 10  # in which an error must be told; far less on an idle machine
MANIFEST = "manifest.json"
PARTS = ("rank-00000.safetensors", "rank-00001.safetensors")
FILES = (*PARTS, "state.json", "rank-00001.json", MANIFEST)
MORE = "rank-00002.safetensors"


class Fault(NamedTuple):
    # on a copy of a checkpoint; the second path is one of another step
    inflict: Callable[[Path, Path], object]
    told: str  # regular expression: what the error says


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


DAMAGE: dict[str, Callable[[Path], object]] = {
    "cut short": cut,
    "cut to nothing": lambda path: os.truncate(path, 0),
    "with more at its end": lambda path: path.write_bytes(path.read_bytes() + b"\0"),
    "missing": Path.unlink,
    "with a bit flipped": flip,
    "with its last bits flipped": lambda path: flip(path, 0.9999),
    "a pipe": lambda path: replace(path, os.mkfifo),
    "a directory": lambda path: replace(path, Path.mkdir),
    "a link to nothing": lambda path: replace(path, lambda path: path.symlink_to("nothing")),
}


def one_more(checkpoint: Path, other: Path) -> None:
    shutil.copy(other / PARTS[0], checkpoint / MORE)


FAULTS: dict[str, Fault] = {
    "parts exchanged": Fault(
        lambda c, o: exchange(c / PARTS[0], c / PARTS[1]), r"/rank-0000\d\.\w+: expected"
    ),
    "a part more": Fault(one_more, f"/{MORE}: expected"),
    "an edited manifest": Fault(
        lambda c, o: (c / MANIFEST).write_text((c / MANIFEST).read_text().replace('"step": 1', '"step": 5')),
        r"manifest\.json: expected .* blake3 \w{64}, found \w{64}",
    ),
}
for name in FILES:
    for what, damage in DAMAGE.items():
        FAULTS[f"{name} {what}"] = Fault(
            lambda c, o, name=name, damage=damage: damage(c / name), rf"/{re.escape(name)}: expected .*found"
        )
    FAULTS[f"{name} of another step"] = Fault(
        lambda c, o, name=name: shutil.copy(o / name, c / name), ": expected blake3"
    )


def load_all(folder: Path) -> dict[str, Outcome]:
    """Inflict each fault on a copy and load it, which changes nothing."""
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
        copy = folder / name
        if rank() == 0:
            shutil.copytree(home, copy)
            fault.inflict(*checkpoints(copy).values())
        dist.barrier()
        found[name] = outcome(partial(load_distributed, copy, model, optimizer, step=1))
        assert fingerprint(model, optimizer) == untouched, name
    load_distributed(home, model, optimizer, step=1)  # after all that the good one still loads
    assert fingerprint(model, optimizer) != untouched
    return found


@pytest.fixture(scope="module")
def damaged(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Outcome]]]:
    folder = tmp_path_factory.mktemp("damaged")
    return folder, run_on_ranks(load_all, folder, timeout=110)


@pytest.mark.parametrize("name", FAULTS)
def test_a_damaged_checkpoint_is_refused(
    name: str, damaged: tuple[Path, list[dict[str, Outcome]]], tmp_path: Path
) -> None:
    folder, by_rank = damaged
    found, other = (one[name] for one in by_rank)
    assert (found.error, found.kind) == (other.error, other.kind), "the ranks have other errors"
    assert re.search(FAULTS[name].told, str(found.error)), found.error
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
    "another width": ({"make": lambda: Net(4)}, ERROR, r"expected shape \[11, 4\] .*found \[11, 6\]"),
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
    told = outcome(lambda: load_distributed(folder / name, model, optimizer, **options))
    assert make is on_meta or fingerprint(model) == before
    assert optimizer is None or not optimizer.state
    return told


def ask_all(folder: Path) -> dict[str, Outcome]:
    model, optimizer = build("fsdp2")
    train(model, optimizer, Data(), 1)
    for step in (10, 20):
        save_distributed(folder / "good", model, optimizer, step=step)
    save_distributed(folder / "model", model, step=1)
    (folder / "empty").mkdir(exist_ok=True)
    dist.barrier()
    return {name: ask(folder, **given) for name, (given, *_) in ASKED.items()}


def test_what_is_not_there_is_told_by_class_and_text(tmp_path: Path) -> None:
    first, second = run_on_ranks(ask_all, tmp_path)
    for name, (_, kind, text) in ASKED.items():
        assert (first[name].error, first[name].kind) == (second[name].error, second[name].kind)
        assert first[name].kind == kind, name
        assert re.search(text, str(first[name].error)), first[name].error


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
