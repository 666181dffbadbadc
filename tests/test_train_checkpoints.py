"""A run's checkpoints: saved in the background, what failed is told, and the newest whole one is loaded."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fsdp_utils import CheckpointError, load_distributed
from fsdp_utils.checkpoint import save as save_module
from fsdp_utils.checkpoint.manifest import committed
from fsdp_utils.train.checkpoints import Checkpoints, resume


class Log:
    """Remembers what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[str, int]] = []

    def event(self, event: str, *, step: int, error: str = "") -> None:
        assert bool(error) == (event != "saved")
        self.told.append((event, step))


class Run:
    def __init__(self, out: Path, *, keep: int = 2, saved: int | None = None) -> None:
        self.out, self.log = out, Log()
        self.model = nn.Linear(3, 4)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        about: dict[str, Any] = {"config": {"a": 1}}
        self.checkpoints = Checkpoints(out, keep, saved, self.log, about)  # type: ignore[arg-type]

    def begin(self, step: int) -> None:
        self.checkpoints.begin(self.model, self.optimizer, step, seen=10 * step)

    def finish(self, step: int) -> None:
        self.checkpoints.finish(self.model, self.optimizer, step, seen=10 * step)

    def steps(self) -> list[int]:
        return [one.step for one in committed(self.out)]


class FullDisk:
    """No manifest can be written while it is full."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.full, write = True, save_module.write_manifest

        def write_if_there_is_room(*given: Any) -> None:
            if self.full:
                raise OSError(28, "No space left on device", "the disk")
            write(*given)

        monkeypatch.setattr(save_module, "write_manifest", write_if_there_is_room)


def test_each_save_is_told_when_it_is_there_and_the_last_step_is_saved_once(tmp_path: Path) -> None:
    run = Run(tmp_path)
    for step in (1, 2, 3):
        run.begin(step)
        assert run.log.told == [("saved", one) for one in range(1, step)]
    run.finish(3)
    assert run.log.told == [("saved", 1), ("saved", 2), ("saved", 3)]
    assert [one.path.name for one in committed(tmp_path)] == ["000002-step-2", "000003-step-3"]
    run.finish(4)
    assert run.log.told[-1] == ("saved", 4)
    run.finish(4)
    assert [one.path.name for one in committed(tmp_path)] == ["000003-step-3", "000004-step-4"]
    state = load_distributed(tmp_path, run.model, run.optimizer)
    assert (state["step"], state["seen"], state["config"]) == (4, 40, {"a": 1})


def test_the_step_that_a_run_goes_on_from_is_not_saved_again(tmp_path: Path) -> None:
    run = Run(tmp_path, saved=5)
    run.finish(5)
    assert (run.log.told, run.steps()) == ([], [])
    run.finish(6)
    assert (run.log.told, run.steps()) == ([("saved", 6)], [6])


def test_a_save_that_fails_in_the_background_is_told_as_its_own_and_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, disk = Run(tmp_path), FullDisk(monkeypatch)
    run.begin(1)
    run.begin(2)
    assert run.log.told == [("failed to save", 1)]
    run.checkpoints._wait()
    disk.full = False
    run.begin(3)
    run.finish(3)
    assert run.log.told == [("failed to save", 1), ("failed to save", 2), ("saved", 3)]
    assert run.steps() == [3]


def test_a_save_that_cannot_begin_is_told_and_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> Any:
        raise OSError(28, "No space left on device", "the disk")

    run = Run(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(save_module, "begin", refuse)
        run.begin(1)
    assert run.log.told == [("failed to save", 1)]
    run.finish(1)  # a save that has failed is none
    assert run.log.told == [("failed to save", 1), ("saved", 1)]


def test_a_run_does_not_end_as_if_its_last_step_were_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, disk = Run(tmp_path), FullDisk(monkeypatch)
    run.begin(1)
    with pytest.raises(CheckpointError, match="No space left"):
        run.finish(1)
    assert run.log.told == [("failed to save", 1)]
    disk.full = False
    run.finish(1)
    assert (run.log.told[1:], run.steps()) == ([("saved", 1)], [1])


# ---- resuming --------------------------------------------------------------------------------------


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_damaged_ones_are_set_aside_until_one_is_whole(tmp_path: Path) -> None:
    run = Run(tmp_path, keep=3)
    for step in (1, 2, 3):
        run.finish(step)
    for one in committed(tmp_path)[1:]:
        flip(one.path / "__0_0.distcp")
    state, damaged = resume(tmp_path, run.model, run.optimizer)
    assert (state["step"], state["seen"]) == (1, 10)
    assert ["000003-step-3" in damaged[0], "000002-step-2" in damaged[1]] == [True, True]
    assert len(damaged) == 2
    assert run.steps() == [1]
    aside = sorted(path.name.rsplit("-", 1)[0] for path in tmp_path.glob("damaged-*"))
    assert aside == ["damaged-000002-step-2", "damaged-000003-step-3"]
    assert resume(tmp_path, run.model, run.optimizer) == (state, [])


def test_where_all_are_damaged_or_none_is_there_the_run_begins_anew(tmp_path: Path) -> None:
    run = Run(tmp_path / "none")
    assert resume(tmp_path / "none", run.model, run.optimizer) == ({}, [])
    run = Run(tmp_path / "one")
    run.finish(1)
    flip(committed(run.out)[0].path / "__0_0.distcp")
    state, damaged = resume(run.out, run.model, run.optimizer)
    assert (state, len(damaged)) == ({}, 1)


def test_a_whole_one_of_another_model_is_refused_and_stays(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.finish(1)
    other = nn.Linear(5, 4)
    with pytest.raises(CheckpointError, match="weight"):
        resume(tmp_path, other, torch.optim.AdamW(other.parameters()))
    assert run.steps() == [1]
