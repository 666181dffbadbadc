"""The doctor: each fault of doctor_scripts is found by its name, and nothing in the right twins."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from fsdp_utils.answers import explain
from fsdp_utils.doctor.__main__ import TABLE
from tests.doctor_ranks import examine

SCRIPTS = Path(__file__).with_name("doctor_scripts")
FOUR = {"experts_dim0", "hybrid_not_synced"}  # scripts for four ranks
NAMES = [file.stem for file in sorted(SCRIPTS.glob("*.py")) if not file.stem.startswith(("common", "__"))]
OTHERS = {"forward_skips_root": "forward_of_part"}  # a script with another name than its finding
AT_ONCE = 3


def finding_of(name: str) -> str:
    return OTHERS.get(name) or next(one["id"] for one in TABLE if name.startswith(one["id"]))


@pytest.fixture(scope="module")
def runs() -> Iterator[dict[tuple[str, str], "Future[dict[str, Any]]"]]:
    """The results of all scripts in both modes, a few of which run at once."""
    with ThreadPoolExecutor(AT_ONCE) as pool:
        yield {
            (name, mode): pool.submit(examine, SCRIPTS / f"{name}.py", mode, ranks=4 if name in FOUR else 2)
            for name in NAMES
            for mode in ("fault", "right")
        }


@pytest.mark.parametrize("name", NAMES)
def test_a_fault_is_found_by_its_name_and_no_other_error(name: str, runs: dict[Any, Any]) -> None:
    found = runs[name, "fault"].result()["findings"]
    assert finding_of(name) in {one["id"] for one in found}
    assert {one["id"] for one in found if one["severity"] == "error"} <= {finding_of(name)}
    assert all(one["evidence"] for one in found)


@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_found_in_the_right_twin(name: str, runs: dict[Any, Any]) -> None:
    result = runs[name, "right"].result()
    assert [(one["id"], one["evidence"]) for one in result["findings"]] == []
    for rank in result["ranks"]:
        assert (rank["ended"], len(rank["seen"])) == ("stopped", 3)
        assert rank["unseen"] == []


def test_each_finding_of_the_table_has_a_script() -> None:
    assert {finding_of(name) for name in NAMES} == {one["id"] for one in TABLE}
