"""The short form of benchmarks/chaos.py: a run that is disturbed four times ends as if it never had been.

The model is a tiny one: starts are many. A rank is killed (SIGKILL) where the newest checkpoint is cut short.
"""

import re
import sys
from pathlib import Path

import pytest

from benchmarks import chaos
from benchmarks.chaos import CUT_SHORT, DISK_FULL

ROOT = Path(__file__).parents[1]
STEPS = 40
HANG_S = 5.0
SOURCE = "tests.tiny_training:slow"


@pytest.mark.timeout(300)  # three restarts; about a minute where the cores are free
@pytest.mark.skipif(sys.platform != "linux", reason="the processes of a run are looked for as Linux has them")
def test_a_run_that_is_disturbed_ends_by_itself_with_the_same_losses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))  # where SOURCE is
    kinds = [CUT_SHORT, "SIGTERM of all ranks", DISK_FULL, "SIGSTOP of a rank"]
    if not chaos.can_fill_a_disk():  # it takes root
        kinds.remove(DISK_FULL)
    faults, losses, events = chaos.disturb(tmp_path, 2, STEPS, kinds, 0, HANG_S, SOURCE)
    wanted = chaos.undisturbed(tmp_path, 2, STEPS, SOURCE)
    held = chaos.checks(faults, losses, wanted)
    assert all(held.values()), held
    assert [fault.kind for fault in faults] == kinds
    assert [event["event"] for event in events] == ["damaged", "finished"]
    stopped = faults[1]
    assert stopped.repeated == 0  # asked to stop, it saves first
    log = (tmp_path / "disturbed" / "log").read_text()
    silent = re.search(r"Hang: at .*, no move for \d+ s; no stacks from rank (\d)\. Compare the stacks", log)
    assert silent, log[-3000:]
    assert "Fatal Python error: Aborted" in log  # its stacks, by itself
    assert (tmp_path / "disturbed" / "hang" / f"stack-of-rank-{1 - int(silent[1])}.txt").exists()
