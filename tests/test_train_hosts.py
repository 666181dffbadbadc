"""The training program on two hosts under torchrun: static, and elastic with a rank that is killed."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from benchmarks import two_hosts

STEPS = 12
LIMIT_S = 60.0
PROGRAM = ["-m", "fsdp_utils.train", f"--steps={STEPS}", "--save_every=3", "--eval_every=100"]
PROGRAM += ["--data.source=fsdp_utils.lessons.tasks:dates_llama", "--parallel.device=cpu", "--hang_s=30"]


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
            command = [*torchrun, *own, *PROGRAM, f"--out={out}"]
            agent = subprocess.Popen(
                ["ip", "netns", "exec", host, *command],
                env={**os.environ, "GLOO_SOCKET_IFNAME": "link", "OMP_NUM_THREADS": "1"},
                stdout=subprocess.DEVNULL,
                stderr=self.undo.enter_context((self.folder / f"{out.name}{i}.log").open("w")),
                start_new_session=True,
            )
            self.undo.callback(end, agent)
            agents.append(agent)
        return agents

    def wait(self, agents: list["subprocess.Popen[bytes]"]) -> None:
        limit = time.monotonic() + LIMIT_S
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


def lines(path: Path) -> list[dict]:
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def losses(out: Path) -> dict[int, float]:
    return {line["step"]: line["loss"] for line in lines(out / "metrics.jsonl") if "loss" in line}


@pytest.mark.timeout(240)
@pytest.mark.skipif(two_hosts.why_not() is not None, reason=f"two hosts: {two_hosts.why_not()}")
def test_on_two_hosts_a_killed_rank_costs_no_step_and_changes_no_loss(tmp_path: Path) -> None:
    names = [f"fsdp{os.getpid()}{letter}" for letter in "cd"]
    with ExitStack() as undo:
        two_hosts.connect(names, None, 0.0, undo)
        hosts = TwoHosts(names, tmp_path, undo)

        static = ["--node-rank={host}", "--master-addr=10.77.0.1", "--master-port=29400"]
        hosts.wait(hosts.start(tmp_path / "static", *static))
        assert [*losses(tmp_path / "static")] == [*range(1, STEPS + 1)]

        elastic = ["--rdzv-backend=c10d", "--rdzv-endpoint=10.77.0.1:29500", "--rdzv-id=test"]
        elastic += ["--max-restarts=2", "--rdzv-conf=is_host={first}", "--local-addr={address}"]
        out = tmp_path / "elastic"
        agents = hosts.start(out, *elastic)
        limit = time.monotonic() + LIMIT_S
        while len(losses(out)) < 7:
            assert time.monotonic() < limit, hosts.logs()
            time.sleep(0.02)
        (rank,) = psutil.Process(agents[1].pid).children()
        rank.send_signal(signal.SIGKILL)
        hosts.wait(agents)
    started = [event["step"] for event in lines(out / "events.jsonl") if event["event"] == "started"]
    assert len(started) == 2
    assert started[0] == 0
    assert started[1] >= 3  # from a checkpoint
    assert losses(out) == pytest.approx(losses(tmp_path / "static"))
