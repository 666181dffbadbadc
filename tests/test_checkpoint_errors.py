"""Which checkpoints are there, and why one cannot be loaded: the same class of error on every rank."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from fsdp_utils import (
    CheckpointDamagedError,
    CheckpointError,
    CheckpointMismatchError,
    CheckpointNotFoundError,
    checkpoints,
    latest_step,
    load_distributed,
    load_full,
    save_distributed,
    save_full,
    verify_checkpoint,
)
from tests.checkpoints import rank
from tests.sharded import TwoRanks


def test_the_checkpoints_of_a_directory_by_step(tmp_path: Path) -> None:
    model, home = nn.Linear(2, 2), tmp_path / "run"
    assert (checkpoints(home), latest_step(home)) == ({}, None)
    home.mkdir()
    assert (checkpoints(home), latest_step(home)) == ({}, None)
    paths = [save_distributed(home, model, step=step).wait() for step in (7, 20, 3, 7)]
    (home / ".saving-x-000009-step-99").mkdir()
    assert list(checkpoints(str(home)).items()) == [(20, paths[1]), (3, paths[2]), (7, paths[3])]
    assert latest_step(str(home)) == 7
    assert load_distributed(home, model)["step"] == 7


def change_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def other(*sizes: int) -> nn.Module:
    return nn.Sequential(*(nn.Linear(2, size) for size in sizes))


LOADS: dict[str, tuple[type[CheckpointError], Callable[[Path], object]]] = {
    "no directory": (CheckpointNotFoundError, lambda path: load_distributed(path / "none", other(2))),
    "no such step": (CheckpointNotFoundError, lambda path: load_distributed(path / "d", other(2), step=2)),
    "no file": (CheckpointNotFoundError, lambda path: load_full(path / "none.pt", other(2))),
    "no file, unverified": (
        CheckpointNotFoundError,
        lambda path: load_full(path / "none.pt", other(2), verify=False),
    ),
    "another model": (CheckpointMismatchError, lambda path: load_distributed(path / "d", other(3))),
    "another model in a file": (CheckpointMismatchError, lambda path: load_full(path / "f.pt", other(2, 2))),
    "no optimizer": (
        CheckpointMismatchError,
        lambda path: load_full(path / "f.pt", model := other(2), torch.optim.SGD(model.parameters())),
    ),
    "no such state": (
        CheckpointMismatchError,
        lambda path: load_distributed(path / "d", model := other(2), state={"other": model}),
    ),
    "a changed byte": (CheckpointDamagedError, lambda path: load_distributed(path / "byte", other(2))),
    "a changed byte in a file": (CheckpointDamagedError, lambda path: load_full(path / "byte.pt", other(2))),
    "a file cut short": (CheckpointDamagedError, lambda path: load_distributed(path / "short", other(2))),
    "a missing part": (CheckpointDamagedError, lambda path: load_distributed(path / "part", other(2))),
    "no manifest": (CheckpointDamagedError, lambda path: load_distributed(path / "manifest", other(2))),
    "no description": (CheckpointDamagedError, lambda path: load_distributed(path / "about", other(2))),
    "an argument": (CheckpointError, lambda path: load_distributed(path / "d", other(2), step=-1.5)),  # type: ignore[arg-type]
    "one rank alone": (
        CheckpointError,
        lambda path: load_distributed(path / ("d" if rank() else "none"), other(2)),
    ),
}


def kinds_of_errors(folder: Path) -> dict[str, tuple[str, str]]:
    save_distributed(folder / "d", other(2), step=1)
    save_full(folder / "f.pt", other(2))
    if rank() == 0:
        for name in ("byte", "short", "part", "manifest", "about"):
            shutil.copytree(folder / "d", folder / name)
        part = "000001-step-1/__0_0.distcp"
        shutil.copy(folder / "f.pt", folder / "byte.pt")
        change_byte(folder / "byte.pt")
        change_byte(folder / "byte" / part)
        (folder / "short" / part).write_bytes(b"")
        (folder / "part" / part).unlink()
        (folder / "manifest/000001-step-1/manifest.json").unlink()
        (folder / "about/000001-step-1/.metadata").unlink()
    torch.distributed.barrier()
    found = {}
    for name, (_, load) in LOADS.items():
        with pytest.raises(CheckpointError) as caught:
            load(folder)
        found[name] = type(caught.value).__name__, str(caught.value)
    return found


def test_the_class_of_an_error_says_why_on_every_rank(two_ranks: TwoRanks, tmp_path: Path) -> None:
    first, second = two_ranks(kinds_of_errors, tmp_path)
    assert first == second
    assert {name: kind for name, (kind, _) in first.items()} == {
        name: kind.__name__ for name, (kind, _) in LOADS.items()
    }
    with pytest.raises(CheckpointNotFoundError):
        verify_checkpoint(tmp_path / "none")
    with pytest.raises(CheckpointDamagedError):
        verify_checkpoint(tmp_path / "byte")
