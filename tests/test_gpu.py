"""`benchmarks/gpu.py`: all of its code runs in a dry run on a CPU; measured results are kept."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

from benchmarks import gpu


def test_a_dry_run_records_every_part(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "ignore", "benchmarks/gpu.py", "--dry-run", str(tmp_path)]
    root = Path(__file__).parent.parent
    ended = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=150)
    assert ended.returncode == 0, ended.stdout
    smoke, planner = (json.loads((tmp_path / f"{part}.json").read_text()) for part in ("smoke", "planner"))
    assert [row["setting"] for row in smoke["results"]["rows"]] == [check.__name__ for check in gpu.CHECKS]
    assert list(planner["results"]["errors"]) == ["step time"]  # a CPU's allocator keeps no peaks
    assert smoke["dry_run"]
    assert planner["dry_run"]


def test_a_check_that_fails_is_named_and_stops_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[str] = []

    def good(*_: Any) -> dict[str, Any]:
        ran.append("good")
        return {}

    def bad(*_: Any) -> dict[str, Any]:
        raise AssertionError("other masks")

    monkeypatch.setattr(gpu, "CHECKS", (bad, good))
    assert gpu.record(gpu.smoke, gpu.torch.device("cpu"), tmp_path) == ["bad: AssertionError: other masks"]
    assert ran == ["good"]
