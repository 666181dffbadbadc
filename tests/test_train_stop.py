"""Asked to stop: a rank that moves saves first; one that waits in C for ever ends by itself, in words."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from fsdp_utils.checkpoint.manifest import committed
from fsdp_utils.train.watchdog import Heartbeat, StopSignal
from tests.training_runs import metrics

ROOT = Path(__file__).resolve().parent.parent


def stopped_after_4_steps(out: Path, task: str, stuck_s: float) -> tuple[int, float, str]:
    """Exit code, seconds from SIGTERM to the end, and stderr of a program of one rank."""
    code = f"import sys; from fsdp_utils.train import loop, watchdog; watchdog._STUCK_S = {stuck_s}; "
    command = [sys.executable, "-c", code + "sys.exit(loop.main())", f"--out={out}", "--save_every=2"]
    command += [f"--data.source=tests.tiny_training:{task}", "--data.batch_size=8", "--parallel.device=cpu"]
    program = subprocess.Popen(
        [*command, "--steps=500"],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )
    try:
        while not (out / "metrics.jsonl").exists() or len(metrics(out)) < 4:
            assert program.poll() is None
            time.sleep(0.05)
        program.send_signal(signal.SIGTERM)
        begun = time.monotonic()
        _, told = program.communicate(timeout=60)
        return program.returncode, time.monotonic() - begun, told
    finally:
        program.kill()
        program.communicate()


def test_a_rank_that_waits_in_c_ends_by_itself_in_words(tmp_path: Path) -> None:
    code, seconds, told = stopped_after_4_steps(tmp_path, "stuck", 1.0)
    assert code == 70, told[-3000:]
    assert seconds < 10
    assert "[rank 0] asked to stop by SIGTERM, it has not moved for" in told
    assert "at step 5: it ends without saving" in told
    assert "in forward" in told  # the stack of what it waits in
    assert committed(tmp_path / "checkpoints")[-1].step in (2, 4)


def test_a_rank_whose_steps_take_longer_than_that_still_saves(tmp_path: Path) -> None:
    """A step takes a tenth of a second, where a fiftieth without a move counts as stuck."""
    code, _, told = stopped_after_4_steps(tmp_path, "slow", 0.02)
    assert code == 75, told[-3000:]
    assert committed(tmp_path / "checkpoints")[-1].step == max(metrics(tmp_path))


def test_what_counts_as_stuck(tmp_path: Path) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        heart = Heartbeat(tmp_path, 60.0)
        asked = time.monotonic()
        time.sleep(0.05)
        assert heart.where == "start"
        assert (heart.stuck_s(asked, 0.02) or 0) >= 0.05
        assert heart.stuck_s(time.monotonic(), 0.02) is None  # it was asked only now
        heart.longest_step_s = 10.0
        assert heart.stuck_s(asked, 0.02) is None
        heart.longest_step_s = 0.0
        heart._is_saving = True
        assert heart.stuck_s(asked, 0.02) is None
    finally:
        dist.destroy_process_group()


def test_handlers_are_as_before_after_it(tmp_path: Path) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        numbers = (signal.SIGTERM, signal.SIGUSR1)
        before = [signal.getsignal(number) for number in numbers]
        wakeup = signal.set_wakeup_fd(-1)
        signal.set_wakeup_fd(wakeup)
        with StopSignal(Heartbeat(tmp_path, 60.0)) as stop:
            os.kill(os.getpid(), signal.SIGUSR1)
            assert stop.wanted == "SIGUSR1"
        assert [signal.getsignal(number) for number in numbers] == before
        assert signal.set_wakeup_fd(wakeup) == wakeup
    finally:
        dist.destroy_process_group()


pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")
