"""The training program as others start it: an elastic torchrun on two hosts, and a job of Slurm."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks import two_hosts
from fsdp_utils import run_on_ranks
from tests.training_runs import events, metrics, saved, undisturbed_losses

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


def end(agent: "subprocess.Popen[bytes]") -> None:
    """Kill an agent and its ranks, which lead sessions of their own."""
    if agent.poll() is None:
        for process in [*psutil.Process(agent.pid).children(recursive=True), agent]:
            process.kill()
        agent.wait()


@pytest.mark.timeout(240)
@pytest.mark.skipif(two_hosts.why_not() is not None, reason=f"two hosts: {two_hosts.why_not()}")
def test_on_two_hosts_a_killed_rank_costs_no_step_and_changes_no_loss(tmp_path: Path) -> None:
    """torchrun on both, each with one rank."""
    names, out, agents = [f"fsdp{os.getpid()}{letter}" for letter in "cd"], tmp_path / "run", []

    def logs() -> str:
        return "\n".join(log.read_text()[-2500:] for log in sorted(tmp_path.glob("*.log")))

    def until(ready: Callable[[], bool], pause_s: float) -> None:
        limit = time.monotonic() + HOSTS_LIMIT_S
        while not ready():
            assert time.monotonic() < limit, logs()
            time.sleep(pause_s)

    with ExitStack() as undo:
        two_hosts.connect(names, None, undo)
        for i, host in enumerate(names):
            torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1"]
            torchrun += ["--rdzv-backend=c10d", "--rdzv-endpoint=10.77.0.1:29500", "--rdzv-id=test"]
            torchrun += ["--max-restarts=2", f"--rdzv-conf=is_host={int(i == 0)}"]
            torchrun += [f"--local-addr=10.77.0.{i + 1}", *ON_HOSTS, f"--out={out}"]
            agent = subprocess.Popen(
                ["ip", "netns", "exec", host, *torchrun],
                env={**os.environ, **ENVIRONMENT},
                stdout=subprocess.DEVNULL,
                stderr=undo.enter_context((tmp_path / f"{i}.log").open("w")),
                start_new_session=True,
            )
            undo.callback(end, agent)
            agents.append(agent)
        until(lambda: len(metrics(out)) >= 7, 0.02)
        (rank,) = psutil.Process(agents[1].pid).children()
        rank.send_signal(signal.SIGKILL)
        until(lambda: all(agent.poll() is not None for agent in agents), 0.05)
        assert [agent.poll() for agent in agents] == [0, 0], logs()
    started = [event["step"] for event in events(out, "started")]
    assert len(started) == 2
    assert started[0] == 0
    assert started[1] >= 3  # from a checkpoint
    undisturbed = run_on_ranks(undisturbed_losses, tmp_path / "undisturbed", HOSTS_STEPS)[0]
    assert [*undisturbed] == [*range(1, HOSTS_STEPS + 1)]
    assert metrics(out) == pytest.approx(undisturbed)


# ---- Slurm -----------------------------------------------------------------------------------------

PROGRAM = ["--data.source=tests.tiny_training:slow", "--parallel.device=cpu", "--save_every=5", "--steps=500"]
# Slurm's commands, as far as examples/train.sbatch uses them: a step is one process on this machine.
SLURM = {
    "srun": 'shift; echo $$ > step; exec "$@"',
    "scancel": 'kill -s "${1#--signal=}" "$(cat step)"',
    "scontrol": 'if [ "$1" = show ]; then echo 127.0.0.1; else echo "$@" >> asked; fi',
}


def until(ready: Callable[[], object], job: "subprocess.Popen[bytes]", log: Path) -> None:
    limit = time.monotonic() + 90
    while not ready():
        assert job.poll() is None, log.read_text()[-3000:]
        assert time.monotonic() < limit, log.read_text()[-3000:]
        time.sleep(0.05)


def test_a_job_out_of_time_saves_and_queues_again_and_a_cancelled_one_saves_and_ends(tmp_path: Path) -> None:
    for name, does in SLURM.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{does}\n")
        (tmp_path / name).chmod(0o755)
    number = str(os.getpid())  # the port follows from it
    given = {"SLURM_JOB_ID": number, "SLURM_JOB_NODELIST": "here", "SLURM_JOB_NUM_NODES": "1"}
    given |= {"RANKS_PER_NODE": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    given["PATH"] = f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    out, log = tmp_path / "run", tmp_path / "log"
    for by_user in (False, True):  # first by Slurm, before its time is over
        script = ["bash", ROOT / "examples" / "train.sbatch", f"--out={out}", *PROGRAM]
        begun = len(metrics(out))
        with log.open("w") as told:
            options: dict[str, Any] = {"env": {**os.environ, **given}, "stdout": told, "stderr": told}
            job = subprocess.Popen(script, cwd=tmp_path, start_new_session=True, **options)
        try:
            until(lambda begun=begun: len(metrics(out)) >= begun + 7, job, log)
            if by_user:
                subprocess.run([tmp_path / "scancel", "--signal=TERM", number], cwd=tmp_path, check=True)
            else:
                job.send_signal(signal.SIGUSR1)
            job.wait(60)
        finally:
            end(job)
        last = events(out, "stopped")[-1]["step"]
        assert last == len(metrics(out)) > begun
        assert list(saved(out))[-1] == last
        assert (tmp_path / "asked").read_text() == f"requeue {number}\n"  # once
    first, second = (event["step"] for event in events(out, "started"))
    assert first == 0
    assert second == events(out, "stopped")[0]["step"]
