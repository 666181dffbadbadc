"""The short form of benchmarks/chaos.py: a run that is disturbed ends as if it never had been.

The model is a tiny one. A rank is halted (SIGSTOP) where the newest checkpoint is cut short: the other one
aborts, torchrun starts both again, and they pass the checkpoint over. tests/test_train_launched.py has the
SIGKILL, tests/test_train_stop.py the other signals and the full disk.
"""

import re
import sys
from pathlib import Path

import pytest

from benchmarks import chaos
from fsdp_utils import run_on_ranks
from tests.training_runs import undisturbed_losses

ROOT = Path(__file__).parents[1]
STEPS = 25
HANG_S = 5.0
KINDS = [f"SIGSTOP of a rank, {chaos.CUT_SHORT}"]


@pytest.mark.timeout(240)  # a restart; twenty seconds where the cores are free
@pytest.mark.skipif(sys.platform != "linux", reason="the processes of a run are looked for as Linux has them")
def test_a_run_that_is_disturbed_ends_by_itself_with_the_same_losses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))  # where the data comes from
    faults, losses, events = chaos.disturb(tmp_path, 2, STEPS, KINDS, 0, HANG_S, "tests.tiny_training:slow")
    held = chaos.checks(faults, losses, run_on_ranks(undisturbed_losses, tmp_path / "undisturbed", STEPS)[0])
    assert all(held.values()), held
    assert [fault.kind for fault in faults] == KINDS
    assert [event["event"] for event in events] == ["damaged", "finished"]
    log = (tmp_path / "disturbed" / "log").read_text()
    silent = re.search(r"Hang: at .*, no move for \d+ s; no stacks from rank (\d)\. Compare the stacks", log)
    assert silent, log[-3000:]
    assert "Fatal Python error: Aborted" in log  # its stacks, by itself
    assert (tmp_path / "disturbed" / "hang" / f"stack-of-rank-{1 - int(silent[1])}.txt").exists()
