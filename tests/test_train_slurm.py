"""examples/train.sbatch in a real Slurm: submitted, pre-empted, queued again, cancelled, resumed."""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests import one_node_slurm

ROOT = Path(__file__).resolve().parent.parent
LIMIT_S = 90.0
STEPS = 40
PROGRAM = ["--data.source=tests.tiny_training:slow", "--parallel.device=cpu", "--save_every=5"]


@pytest.fixture(scope="module")
def slurm() -> Iterator[Callable[..., str]]:
    """Runs one of Slurm's commands and returns what it prints."""
    if reason := one_node_slurm.why_not():
        pytest.skip(f"Slurm: {reason}")
    with one_node_slurm.running() as environment:
        environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
        environment |= {"RANKS_PER_NODE": "2", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}

        def run(*command: str) -> str:
            done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
            assert done.returncode == 0, done.stderr
            return done.stdout.strip()

        yield run


class Job:
    """A job of the program, and what its run has told so far."""

    def __init__(self, slurm: Callable[..., str], folder: Path, *options: str, steps: int = STEPS) -> None:
        self.slurm, self.folder, self.out = slurm, folder, folder / "run"
        script = [*options, f"--chdir={folder}", str(ROOT / "examples" / "train.sbatch")]
        self.id = slurm("sbatch", "--parsable", *script, f"--out={self.out}", f"--steps={steps}", *PROGRAM)

    def events(self, *kinds: str) -> list[dict]:
        return [event for event in lines(self.out / "events.jsonl") if event["event"] in kinds]

    def steps(self) -> list[int]:
        return [line["step"] for line in lines(self.out / "metrics.jsonl") if "loss" in line]

    def state(self) -> str:
        return self.slurm("scontrol", "show", "job", self.id).split("JobState=")[1].split()[0]

    def until(self, ready: Callable[[], object], limit_s: float = LIMIT_S) -> None:
        end = time.monotonic() + limit_s
        while not ready():
            logs = "".join(log.read_text()[-2500:] for log in self.folder.glob("train-*.log"))
            assert time.monotonic() < end, f"job {self.id} is {self.state()}; {logs}"
            time.sleep(0.1)


def lines(path: Path) -> list[dict]:
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


@pytest.mark.timeout(400)  # three starts of the program, and a queue
def test_preempted_it_saves_and_queues_again_cancelled_it_saves_and_ends(
    slurm: Callable[..., str], tmp_path: Path
) -> None:
    job = Job(slurm, tmp_path)
    job.until(lambda: len(job.steps()) >= 7)
    slurm("scancel", "--batch", "--signal=USR1", job.id)  # as --signal=B:USR1 does, before the time is over
    job.until(lambda: job.events("stopped"))
    (stopped,) = job.events("stopped")
    assert stopped["signal"] == "SIGTERM"
    assert stopped["step"] == len(job.steps())

    job.until(lambda: len(job.events("started")) == 2)  # Slurm starts it again by itself
    assert job.events("started")[1]["step"] == stopped["step"]
    job.until(lambda: len(job.steps()) >= stopped["step"] + 3)
    slurm("scancel", job.id)
    job.until(lambda: job.state() == "CANCELLED")
    assert len(job.events("stopped")) == 2
    assert job.events("stopped")[1]["step"] == len(job.steps())

    again = Job(slurm, tmp_path)
    again.until(lambda: again.state() == "COMPLETED")
    assert again.events("started")[2]["step"] == job.events("stopped")[1]["step"]
    assert again.steps() == [*range(1, STEPS + 1)]
