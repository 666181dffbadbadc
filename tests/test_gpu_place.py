"""`benchmarks/gpu.py place`: only what a GPU measured with this code gets among the recordings."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

from benchmarks import gpu
from benchmarks.gpu_parts import place
from benchmarks.gpu_parts.recorder import ROOT, code_hash
from tests import imagined_part

MODULE = "tests.imagined_part"
COMMIT = "0123456789" * 4
MEASURED = {
    "step_s": {"median": 0.2, "quartiles": [0.1, 0.3], "raw": [0.1, 0.2, 0.3]},
    "peak_allocated_gib": 30.0,
    "peak_reserved_gib": 40.0,
    "mfu": 0.5,
}


@pytest.fixture
def good(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A recording without fault, of settings that the part asks for."""
    settings = [{"name": "a"}, {"name": "b"}]
    (tmp_path / "plan.json").write_text(json.dumps(settings))
    monkeypatch.setenv(imagined_part.PLAN, str(tmp_path / "plan.json"))
    monkeypatch.setattr(place, "file_at", lambda commit, name: (ROOT / name).read_bytes())
    return {
        "part": "imagined_part",
        "question": "?",
        "code": code_hash(MODULE),
        "dry_run": False,
        "device": "NVIDIA H200",
        "device_memory_gib": 139.8,
        "driver": "580.1",
        "torch": "2.11.0+cu130",
        "cuda": "13.0",
        "python": "3.12.3",
        "transformers": "5.20.2",
        "date": "2026-01-31",
        "commit": COMMIT,
        "command": "python benchmarks/gpu.py --all --out results",
        "group": None,
        "results": {"measured": ["a", "b"]},
        "settings": [{"setting": setting, "result": MEASURED} for setting in settings],
    }


def placed(recording: dict[str, Any], tmp_path: Path) -> int:
    (tmp_path / "imagined_part.json").write_text(json.dumps(recording))
    return place.place(tmp_path, {"imagined_part": MODULE}, recorded=tmp_path / "recorded")


def test_a_recording_without_fault_is_placed_as_it_is(good: dict, tmp_path: Path) -> None:
    assert placed(good, tmp_path) == 0
    assert json.loads((tmp_path / "recorded" / "imagined_part.json").read_text()) == good


def test_settings_that_failed_are_counted_and_do_not_stop_the_others(
    good: dict, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    good["settings"][1]["result"] = {"error": "RuntimeError: not on this GPU"}
    assert placed({**good, "results": {"measured": ["a"]}}, tmp_path) == 0
    assert "placed, 1 of 2 settings failed" in capsys.readouterr().out


def of_step(**changed: Any) -> dict[str, Any]:
    settings = [{"setting": {"name": name}, "result": MEASURED} for name in "ab"]
    settings[1]["result"] = {**MEASURED, **changed}
    return {"settings": settings}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"part": "memory"}, "expected the part imagined_part, found memory"),
        ({"dry_run": True}, "expected a recording, found a dry run"),
        ({"cuda": None, "device": "x86_64"}, "expected a CUDA GPU, found x86_64"),
        ({"torch": "2.6.0+cu124"}, "expected torch 2.11 or later, found 2.6.0+cu124"),
        ({"transformers": None}, "expected the version of transformers, found None"),
        ({"date": "2999-01-01"}, "2999-01-01, a day to come"),
        ({"date": "yesterday"}, "expected a date, found 'yesterday'"),
        ({"code": "older"}, "its code has changed since it was made"),
        ({"commit": "unknown"}, "expected a commit of 40 hexadecimal digits, found 'unknown'"),
        ({"results": {"measured": ["a"]}}, "its results do not follow from its settings"),
        (of_step(mfu=1.7), " has an MFU of 1.7"),
        (of_step(peak_reserved_gib=141.0), "reserved 141.0 of 139.8 GiB"),
        (of_step(peak_allocated_gib=41.0), "allocated 41.0 and reserved 40.0"),
        (of_step(step_s={**MEASURED["step_s"], "median": 0.4}), ".step_s is no spread of seconds"),
        (of_step(speed=float("nan")), "numbers that are not finite: NaN"),
        (of_step(speed=float("-inf")), "numbers that are not finite: -Infinity"),
        (of_step(error="RuntimeError"), "its results do not follow"),
    ],
)
def test_a_recording_with_a_fault_is_refused_by_its_name(
    changed: dict, message: str, good: dict, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    assert placed({**good, **changed}, tmp_path) == 1
    refused = [line for line in capsys.readouterr().out.splitlines() if line.startswith("imagined_part: ")]
    assert any(message in line for line in refused), refused
    assert not (tmp_path / "recorded").exists()


def test_a_recording_that_is_not_complete_is_refused(
    good: dict, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    del good["settings"][1]
    assert placed({**good, "results": {"measured": ["a"]}}, tmp_path) == 1
    assert 'the setting {"name": "b"} is missing' in capsys.readouterr().out


@pytest.mark.parametrize("text", ["", "[]", '{"part": "imagined_part"}', '{"part": '])
def test_what_is_no_recording_is_refused(text: str, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    (tmp_path / "imagined_part.json").write_text(text)
    assert place.place(tmp_path, {"imagined_part": MODULE}, recorded=tmp_path / "recorded") == 1
    assert "imagined_part: " in capsys.readouterr().out


def test_the_commit_has_to_hold_the_code_that_was_recorded(
    good: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(place, "file_at", lambda commit, name: b"other code")
    assert placed(good, tmp_path) == 1
    assert f"the commit {COMMIT} holds other code" in capsys.readouterr().out

    def unknown(commit: str, name: str) -> bytes:
        raise subprocess.CalledProcessError(128, "git")

    monkeypatch.setattr(place, "file_at", unknown)
    assert placed(good, tmp_path) == 1
    assert f"the commit {COMMIT} is not in this repository" in capsys.readouterr().out


def test_a_file_is_read_as_it_was_at_a_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(place, "ROOT", tmp_path)
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a"]
    (tmp_path / "code.py").write_text("old")
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "one"]):
        subprocess.run([*git, *command], check=True)
    head = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout
    (tmp_path / "code.py").write_text("new")
    assert place.file_at(head.strip(), "code.py") == b"old"
    with pytest.raises(subprocess.CalledProcessError):
        place.file_at(head.strip(), "other.py")


def test_the_command_tells_what_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    (tmp_path / "train.partial.jsonl").touch()
    assert gpu.main(["place", str(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert "train" in out
    assert out.count("MISSING, not complete") == 1
    assert out.count("MISSING") == 10
