"""`benchmarks/gpu.py`: all of its code runs in a dry run on a CPU; measured results are kept."""

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

from benchmarks import gpu
from benchmarks.machine import RECORDED
from fsdp_utils import answers


@pytest.mark.filterwarnings("ignore")
def test_a_dry_run_records_every_part(tmp_path: Path) -> None:
    assert gpu.main(["--dry-run", str(tmp_path)]) == 0
    smoke, planner = (json.loads((tmp_path / f"{part}.json").read_text()) for part in ("smoke", "planner"))
    assert [row["setting"] for row in smoke["results"]["rows"]] == [check.__name__ for check in gpu.CHECKS]
    assert list(planner["results"]["errors"]) == ["step time"]  # a CPU's allocator keeps no peaks
    assert smoke["dry_run"]
    assert planner["dry_run"]


def test_the_answers_quote_what_was_recorded() -> None:
    recording = json.loads((RECORDED / "costs.json").read_text(encoding="utf-8"))
    rows = {row["setting"]: row for row in recording["results"]["rows"]}
    alone, pinned, paged = (
        rows[way]["step_s"]
        for way in ("as it is", "parameters to the CPU", "parameters to the CPU, not pinned")
    )
    offloaded = rows["activations to the CPU"]["step_s"]
    told = " ".join(str(question) for question in answers.table()["questions"])
    for quoted in (
        f"took {pinned / alone:.1f} times as long, and {paged / alone:.0f} times with `pin_memory=False`",
        f"{alone:.3f} s, {pinned:.3f} s and {paged:.2f} s",
        f"a step took {offloaded / alone:.1f} times as long on an H200",
    ):
        assert quoted in told


def test_a_check_that_fails_is_named_stops_no_other_and_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[str] = []

    def good(*_: Any) -> dict[str, Any]:
        ran.append("good")
        return {}

    def bad(*_: Any) -> dict[str, Any]:
        ran.append("bad")
        if ran.count("bad") == 1:
            raise AssertionError("other masks")
        return {}

    monkeypatch.setattr(gpu, "CHECKS", (bad, good))  # the first one fails once
    monkeypatch.setattr(gpu, "commit", lambda: "0" * 40)
    monkeypatch.setattr("benchmarks.machine.commit", lambda: "0" * 40)
    device = gpu.torch.device("cpu")
    assert gpu.record(gpu.smoke, device, tmp_path) == ["bad: AssertionError: other masks"]
    assert gpu.record(gpu.smoke, device, tmp_path) == []
    assert ran == ["bad", "good", "bad"]
