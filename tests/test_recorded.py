"""A recording is shown with where it was made, and its absence is not hidden."""

import json
from pathlib import Path

from fsdp_utils.lessons import recorded

RECORDING = {
    "device": "NVIDIA H200",
    "torch": "2.13.0",
    "date": "2025-11-21",
    "group": "one rank of 8 under a fake process group",
    "results": {"gain": 1.2},
}


def test_what_is_not_recorded_is_none_and_says_how_to_record_it(tmp_path: Path) -> None:
    assert recorded.load("memory", folder=tmp_path) is None
    text = recorded.caption("memory", folder=tmp_path).data
    assert "Not recorded yet" in text
    assert "python benchmarks/gpu.py memory" in text


def test_a_recording_names_device_version_date_and_that_a_rank_stood_for_many(tmp_path: Path) -> None:
    (tmp_path / "recorded").mkdir()
    (tmp_path / "recorded" / "memory.json").write_text(json.dumps(RECORDING))
    assert recorded.load("memory", folder=tmp_path) == RECORDING
    assert recorded.caption("memory", folder=tmp_path).data == (
        "*Recorded on NVIDIA H200, torch 2.13.0, 2025-11-21, one rank of 8 under a fake process group.*"
    )


def test_a_recording_of_a_single_rank_speaks_of_no_group(tmp_path: Path) -> None:
    (tmp_path / "recorded").mkdir()
    (tmp_path / "recorded" / "memory.json").write_text(json.dumps({**RECORDING, "group": None}))
    assert recorded.caption("memory", folder=tmp_path).data.endswith("2025-11-21.*")
