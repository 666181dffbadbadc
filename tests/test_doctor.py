"""The doctor: each fault of doctor_scripts is found by its name, and nothing in the right twins."""

import runpy
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from fsdp_utils import run_on_ranks
from fsdp_utils.doctor import findings_table
from tests.doctor_ranks import examine

SCRIPTS = Path(__file__).with_name("doctor_scripts")
FOUR = {"experts_dim0", "hybrid_not_synced"}  # scripts for four ranks
NAMES = [file.stem for file in sorted(SCRIPTS.glob("*.py")) if not file.stem.startswith(("common", "__"))]
OTHERS = {"forward_skips_root": "forward_of_part"}  # a script with another name than its finding
AT_ONCE = 3
TABLE = findings_table()


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


LOSSES = """
import runpy, sys, torch.distributed as dist
sys.path.insert(0, {folder!r})
import common
common.say = lambda step, loss, *_: print(
    "LOSS", dist.get_rank(), step, loss.item().hex(), file=open(sys.argv[0] + str(dist.get_rank()), "a")
)
sys.argv[0] = sys.argv[2]
runpy.run_path({script!r}, run_name="__main__")
"""


@pytest.mark.parametrize("name", ["dropout_rng", "big_activation"])
def test_the_training_is_not_changed(name: str, tmp_path: Path) -> None:
    """Losses of all ranks, bit by bit, of a script with dropout and of one whose activations are measured."""
