"""How many ranks are started, on what, and without initialising CUDA in the process that forks them."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch

from fsdp_utils.notebook import fork_server, ranks


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Mock:
    """A GPU build of torch on a machine where NVML does not answer; returns what asks the driver."""
    driver = Mock(return_value=3)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "_is_compiled", lambda: True)
    monkeypatch.setattr(torch.cuda, "_device_count_nvml", lambda: -1)
    monkeypatch.setattr(torch._C, "_cuda_getDeviceCount", driver, raising=False)
    return driver


def fake_python(folder: Path, script: str) -> str:
    """A program that stands in for the Python interpreter of the counting process."""
    program = folder / "python"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    return str(program)


def test_where_nvml_does_not_answer_another_process_asks_the_driver(
    driver: Mock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = tmp_path / "asked"
    script = f'echo "$2" > {asked}; echo a warning; echo 5'
    monkeypatch.setattr(sys, "executable", fake_python(tmp_path, script))
    assert fork_server.count_gpus() == 5
    assert asked.read_text() == "import torch; print(torch.cuda.device_count())\n"
    driver.assert_not_called()


def test_where_nvml_answers_nobody_asks_the_driver(driver: Mock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "_device_count_nvml", lambda: 2)
    with patch.object(subprocess, "run", side_effect=AssertionError):
        assert fork_server.count_gpus() == 2
    driver.assert_not_called()


def test_a_build_of_torch_for_the_cpu_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    with patch.object(subprocess, "run", side_effect=AssertionError):
        assert fork_server.count_gpus() == 0


def test_a_driver_that_crashes_is_told_with_what_it_said(
    driver: Mock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", fake_python(tmp_path, "echo the driver is too old >&2; exit 1"))
    with pytest.raises(RuntimeError, match=r"the driver is too old\nTo use the CPU alone"):
        fork_server.count_gpus()


def resolved(monkeypatch: pytest.MonkeyPatch, gpus: int, **asked: Any) -> dict[str, Any]:
    monkeypatch.setattr(fork_server, "count_gpus", lambda: gpus)
    settings = {"world_size": None, "device": None, **asked}
    fork_server.resolve(settings)
    return settings


@pytest.mark.parametrize(
    ("gpus", "started"), [(2, 2), (3, 3), (4, 4), (5, 4), (6, 6), (7, 6), (8, 8), (10, 8), (16, 12), (32, 24)]
)
def test_as_many_ranks_as_share_a_lessons_batch_equally(
    monkeypatch: pytest.MonkeyPatch, gpus: int, started: int
) -> None:
    settings = resolved(monkeypatch, gpus)
    assert (settings["device"], settings["world_size"]) == ("cuda", started)
    assert settings["unused_gpus"] == gpus - started


@pytest.mark.parametrize(("gpus", "device"), [(0, "cpu"), (1, "cpu")])
def test_four_ranks_on_the_cpu_where_there_are_no_two_gpus(
    monkeypatch: pytest.MonkeyPatch, gpus: int, device: str
) -> None:
    settings = resolved(monkeypatch, gpus)
    assert (settings["device"], settings["world_size"], settings["unused_gpus"]) == (device, 4, 0)


def test_a_number_that_is_asked_for_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = resolved(monkeypatch, 7, world_size=5)
    assert (settings["device"], settings["world_size"]) == ("cuda", 5)
    assert not settings.get("unused_gpus")
    assert resolved(monkeypatch, 7, device="cpu")["world_size"] == 4
    assert resolved(monkeypatch, 1, device="cuda")["world_size"] == 1


class FakeCluster:
    device, ended = "cuda", False

    def __init__(self, world_size: int | None, *_: object) -> None:
        self.settings = {"unused_gpus": 0 if world_size else 1}
        self.world_size = world_size or 4


def test_one_line_says_that_gpus_are_left(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delitem(os.environ, "FSDP_RANKS", raising=False)
    monkeypatch.setattr(ranks, "LocalCluster", FakeCluster)
    monkeypatch.setattr(ranks, "ipython", lambda: "a notebook")
    monkeypatch.setattr(ranks, "_cluster", None)
    ranks.start()
    assert capsys.readouterr().out.splitlines() == [
        "4 ranks in one process group (nccl, one GPU each)",
        "5 GPUs are here. The lessons' batches of 24 samples have no equal shares for 5 ranks; "
        "ranks.start(5) starts them all the same.",
    ]
    monkeypatch.setattr(ranks, "_cluster", None)
    ranks.start(5)
    assert len(capsys.readouterr().out.splitlines()) == 1
