"""`benchmarks/gpu.py --all`: a part that fails stops no other, a run that was cut short goes on."""

import importlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

from benchmarks import gpu
from benchmarks.gpu_parts import NAMES, recorder, smoke
from benchmarks.gpu_parts.recorder import ROOT

CPU = ["--device", "cpu", "--tiny"]


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The parts that are measured from now on, by a `record` that writes a recording and measures nothing."""
    names: list[str] = []

    def record(module: str, run: recorder.Run) -> dict[str, Any] | None:
        name = module.rpartition(".")[2]
        names.append(name)
        if name == "planner":
            raise ImportError("no module of that name")
        if name == "memory":
            return None  # the time was over
        results = [{"setting": {"check": check}, "result": {}} for check in smoke.CHECKS]
        if name == "smoke" and not (run.folder / "mended").exists():
            results[4]["result"] = {"error": "AssertionError: other masks"}
        recording = {**recorder._origin(module, run), "settings": results}
        (run.folder / f"{name}.json").write_text(json.dumps(recording))
        return recording

    monkeypatch.setattr(gpu, "record", record)
    return names


def test_all_records_what_is_missing_and_says_at_its_end_what_failed(
    measured: list[str], tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    assert gpu.main(["--all", *CPU, "--out", str(tmp_path)]) == 1
    assert measured == [name for name in NAMES if name != "child_tuning"]
    out = capsys.readouterr().out
    state = {line.split()[0]: " ".join(line.split()[1:]) for line in out.splitlines() if line}
    assert "1 OF 7 FAILED" in out
    assert state["planner"] == "FAILED, ImportError: no module of that name"
    assert state["memory"] == "not complete"
    check = "child_tuning_steps_as_on_the_cpu"
    assert state["child_tuning"] == f"LEFT OUT, as the smoke check {check} failed"
    assert state["allocator"] == "recorded, 7 settings"
    assert out.splitlines()[-1] == f'smoke: {{"check": "{check}"}} failed: AssertionError: other masks'

    measured.clear()
    assert gpu.main(["--all", *CPU, "--out", str(tmp_path)]) == 1
    assert measured == ["planner", "memory"]  # what is there is not measured again
    assert "1 OF 7 FAILED" in capsys.readouterr().out  # nor forgotten

    measured.clear()
    (tmp_path / "mended").touch()
    assert gpu.main(["smoke", *CPU, "--out", str(tmp_path)]) == 0  # named: measured anew
    assert gpu.main(["--all", *CPU, "--out", str(tmp_path)]) == 1
    assert measured == ["smoke", "planner", "memory", "child_tuning"]


def test_a_recording_of_other_code_is_made_anew(measured: list[str], tmp_path: Path) -> None:
    gpu.main(["--all", *CPU, "--out", str(tmp_path)])
    recording = json.loads((tmp_path / "train.json").read_text())
    (tmp_path / "train.json").write_text(json.dumps({**recording, "code": "older"}))
    measured.clear()
    gpu.main(["--all", *CPU, "--out", str(tmp_path)])
    assert measured == ["train", "planner", "memory"]


def test_what_a_killed_command_has_measured_is_kept(tmp_path: Path) -> None:
    """SIGTERM, as a limit of time sends it, while the first part is measured: its process ends, too."""
    command = [sys.executable, "benchmarks/gpu.py", "mixed_precision", *CPU, "--out", str(tmp_path)]
    partial = tmp_path / "mixed_precision.partial.jsonl"
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, start_new_session=True) as killed:
        limit = time.monotonic() + 60
        while not (partial.exists() and partial.read_text().count("\n") > 1):
            assert time.monotonic() < limit
            assert killed.poll() is None
            time.sleep(0.02)
        killed.send_signal(signal.SIGTERM)
        assert killed.wait(30) == 143
    with pytest.raises(ProcessLookupError):  # nothing of its session is left
        os.killpg(killed.pid, 0)
    assert [setting for setting, _ in recorder.read(partial)][:1] == [{"way": "fp32"}]


def test_without_a_repository_the_commit_has_to_be_named() -> None:
    problem = gpu._not_ready("unknown", gpu=True)
    assert problem is not None
    assert "name the commit" in problem
    assert gpu._not_ready("0" * 40, gpu=True) is None


def test_the_job_for_a_cuda_build_imports_what_there_is() -> None:
    """Nobody would notice otherwise: without a CUDA build it is not run."""
    assert importlib.import_module("tests.cuda_build").RANKS == 8
