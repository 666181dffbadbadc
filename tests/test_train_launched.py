"""The training program as others start it: torchrun on two hosts, static and elastic, and Slurm."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks import two_hosts
from tests import one_node_slurm
from tests.training_runs import events, metrics

ROOT = Path(__file__).resolve().parent.parent


# ---- two hosts -------------------------------------------------------------------------------------

HOSTS_STEPS = 12
HOSTS_LIMIT_S = 60.0
ON_HOSTS = ["-m", "fsdp_utils.train", f"--steps={HOSTS_STEPS}", "--save_every=3", "--eval_every=100"]
ON_HOSTS += ["--data.source=tests.tiny_training:slow", "--parallel.device=cpu", "--hang_s=30"]


# With the store that torchrun keeps, ranks that are started again would find the addresses of the dead.
ENVIRONMENT = {
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    "GLOO_SOCKET_IFNAME": "link",
    "OMP_NUM_THREADS": "1",
}


class TwoHosts:
    """torchrun on both, each with one rank."""

    def __init__(self, hosts: list[str], folder: Path, undo: ExitStack) -> None:
        self.hosts, self.folder, self.undo = hosts, folder, undo

    def start(self, out: Path, *rendezvous: str) -> list["subprocess.Popen[bytes]"]:
        """In arguments, `{host}` is the host's number, `{first}` 1 on the first, else 0."""
        agents = []
        for i, host in enumerate(self.hosts):
            torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1"]
            own = [each.format(host=i, first=int(i == 0), address=f"10.77.0.{i + 1}") for each in rendezvous]
            command = [*torchrun, *own, *ON_HOSTS, f"--out={out}"]
            agent = subprocess.Popen(
                ["ip", "netns", "exec", host, *command],
                env={**os.environ, **ENVIRONMENT},
                stdout=subprocess.DEVNULL,
                stderr=self.undo.enter_context((self.folder / f"{out.name}{i}.log").open("w")),
                start_new_session=True,
            )
            self.undo.callback(end, agent)
            agents.append(agent)
        return agents

    def wait(self, agents: list["subprocess.Popen[bytes]"]) -> None:
        limit = time.monotonic() + HOSTS_LIMIT_S
        while any(agent.poll() is None for agent in agents) and time.monotonic() < limit:
            time.sleep(0.05)
        assert [agent.poll() for agent in agents] == [0, 0], self.logs()

    def logs(self) -> str:
        return "\n".join(log.read_text()[-2500:] for log in sorted(self.folder.glob("*.log")))


def end(agent: "subprocess.Popen[bytes]") -> None:
    """Kill an agent and its ranks, which lead sessions of their own."""
    if agent.poll() is None:
        for process in [*psutil.Process(agent.pid).children(recursive=True), agent]:
            process.kill()
        agent.wait()


@pytest.mark.timeout(240)
@pytest.mark.skipif(two_hosts.why_not() is not None, reason=f"two hosts: {two_hosts.why_not()}")
def test_on_two_hosts_a_killed_rank_costs_no_step_and_changes_no_loss(tmp_path: Path) -> None:
    names = [f"fsdp{os.getpid()}{letter}" for letter in "cd"]
    with ExitStack() as undo:
        two_hosts.connect(names, None, undo)
        hosts = TwoHosts(names, tmp_path, undo)

        static = ["--node-rank={host}", "--master-addr=10.77.0.1", "--master-port=29400"]
        hosts.wait(hosts.start(tmp_path / "static", *static))
        assert [*metrics(tmp_path / "static")] == [*range(1, HOSTS_STEPS + 1)]

        elastic = ["--rdzv-backend=c10d", "--rdzv-endpoint=10.77.0.1:29500", "--rdzv-id=test"]
        elastic += ["--max-restarts=2", "--rdzv-conf=is_host={first}", "--local-addr={address}"]
        out = tmp_path / "elastic"
        agents = hosts.start(out, *elastic)
        limit = time.monotonic() + HOSTS_LIMIT_S
        while len(metrics(out)) < 7:
            assert time.monotonic() < limit, hosts.logs()
            time.sleep(0.02)
        (rank,) = psutil.Process(agents[1].pid).children()
        rank.send_signal(signal.SIGKILL)
        hosts.wait(agents)
    started = [event["step"] for event in events(out, "started")]
    assert len(started) == 2
    assert started[0] == 0
    assert started[1] >= 3  # from a checkpoint
    assert metrics(out) == pytest.approx(metrics(tmp_path / "static"))


# ---- Slurm -----------------------------------------------------------------------------------------

STEPS = 40
LIMIT_S = 90.0
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

    def events(self, kind: str) -> list[dict[str, Any]]:
        return events(self.out, kind)

    def steps(self) -> list[int]:
        return list(metrics(self.out))

    def state(self) -> str:
        return self.slurm("scontrol", "show", "job", self.id).split("JobState=")[1].split()[0]

    def until(self, ready: Callable[[], object], limit_s: float = LIMIT_S) -> None:
        end = time.monotonic() + limit_s
        while not ready():
            logs = "".join(log.read_text()[-2500:] for log in self.folder.glob("train-*.log"))
            assert time.monotonic() < end, f"job {self.id} is {self.state()}; {logs}"
            time.sleep(0.1)


@pytest.mark.timeout(400)  # three starts of the program, and a queue
def test_preempted_it_saves_and_queues_again_cancelled_it_saves_and_ends(
    slurm: Callable[..., str], tmp_path: Path
) -> None:
    job = Job(slurm, tmp_path)
    job.until(lambda: len(job.steps()) >= 7)
    slurm("scancel", "--batch", "--signal=USR1", job.id)  # as --signal=B:USR1 does, before the time is over
    job.until(lambda: job.events("stopped"))
    (stopped,) = job.events("stopped")
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
