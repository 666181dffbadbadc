"""Asked to stop: a rank that moves saves first; one that waits in C for ever ends by itself, in words."""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch.distributed as dist

from fsdp_utils.checkpoint.manifest import committed
from fsdp_utils.train.loop import train
from fsdp_utils.train.watchdog import Heartbeat, StopSignal
from tests.training_runs import configured, metrics

MOMENTS = 5
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
        long_ago = heart._when = time.monotonic() - 100.0
        heart.longest_step_s = 70.0  # it may take twice as long
        assert heart.stuck_s(long_ago, 0.02) is None
        heart.longest_step_s = 40.0
        assert (heart.stuck_s(long_ago, 0.02) or 0) >= 100.0
        heart.longest_step_s = 0.0
        heart._is_saving = True
        assert heart.stuck_s(asked, 0.02) is None
    finally:
        dist.destroy_process_group()


def test_a_limit_holds_until_another_is_given(tmp_path: Path) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with Heartbeat(tmp_path, 60.0) as heart:
            limits = [heart._limit_s]
            for given in (5.0, None, 7.0, None):
                heart.at("a step", given)
                limits.append(heart._limit_s)
        assert limits == [60.0, 5.0, 5.0, 7.0, 7.0]
    finally:
        dist.destroy_process_group()


AFTER = """
import sys, time
from pathlib import Path
import torch.distributed as dist
from fsdp_utils.train import watchdog

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
watchdog._ANSWER_S = 0.1
with watchdog.Heartbeat(Path("hang"), 0.5):
    pass
time.sleep(2.5)  # twice the limit and twice the time for answers is over by then
print("well")
"""


def test_after_its_end_no_limit_ends_the_process(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", AFTER],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert (done.returncode, done.stdout.strip()) == (0, "well"), done.stderr[-3000:]
    assert not (tmp_path / "hang").exists()


def test_another_signal_is_no_request_to_stop_and_the_thread_goes_on_waiting(tmp_path: Path) -> None:
    def waiting() -> list[threading.Thread]:
        return [thread for thread in threading.enumerate() if thread.name == "stop"]

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    before = signal.signal(signal.SIGUSR2, lambda *_: None)
    try:
        with StopSignal(Heartbeat(tmp_path, 60.0)) as stop:
            (thread,) = waiting()
            os.kill(os.getpid(), signal.SIGUSR2)
            thread.join(0.3)
            assert thread.is_alive()
            assert stop.wanted is None
            os.kill(os.getpid(), signal.SIGTERM)
            assert stop.wanted == "SIGTERM"
        thread.join(10)
        assert not thread.is_alive()
        with StopSignal(Heartbeat(tmp_path, 60.0)):
            (thread,) = waiting()
        thread.join(10)  # it ends where no signal came, too
        assert not thread.is_alive()
    finally:
        signal.signal(signal.SIGUSR2, before)
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


def train_alone(out: Path, signal_at: int) -> tuple[int, str | None]:
    """In a process of its own, which gets SIGTERM at its place or file with that number: both are counted.

    Returns:
        How many there were, and the signal that the run says it was stopped by.
    """
    count = 0

    def moment() -> None:
        nonlocal count
        if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
            count += 1
            if count == signal_at:
                os.kill(os.getpid(), signal.SIGTERM)

    def opened(event: str, arguments: tuple[object, ...]) -> None:
        if event in ("open", "os.rename", "os.mkdir") and str(arguments[0]).startswith(str(out)):
            moment()

    at = Heartbeat.at
    Heartbeat.at = lambda *given, **named: (moment(), at(*given, **named))[1]  # type: ignore[method-assign]
    sys.addaudithook(opened)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    stopped = train(configured(out, steps=6)).stopped
    return count, stopped


def stop_at_moments(folder: Path, pipe: Connection) -> None:
    """Forks the runs: what each of them says, and None for one that was killed."""

    def forked(out: Path, signal_at: int) -> tuple[int, str | None] | None:
        pid = os.fork()
        if pid == 0:
            try:
                (folder / f"{out.name}.json").write_text(json.dumps(train_alone(out, signal_at)))
            finally:
                os._exit(0)
        os.waitpid(pid, 0)
        told = folder / f"{out.name}.json"
        found = json.loads(told.read_text()) if told.exists() else None
        told.unlink(missing_ok=True)
        return found

    whole = forked(folder / "whole", 0)
    assert whole is not None
    moments = range(1, whole[0] + 1, max(1, whole[0] // MOMENTS))
    outs = {moment: folder / f"at {moment}" for moment in moments}
    found = [(out.name, forked(out, moment), forked(out, 0)) for moment, out in outs.items()]
    pipe.send([whole, *found])


def test_asked_at_any_moment_it_saves_and_goes_on_without_a_seam(tmp_path: Path) -> None:
    context = multiprocessing.get_context("forkserver")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=stop_at_moments, args=(tmp_path, theirs))
    process.start()
    theirs.close()
    try:
        assert ours.poll(100)
        whole, *moments = ours.recv()
    finally:
        process.kill()
        process.join(60)
    expected = metrics(tmp_path / "whole")
    assert whole[0] > 20
    assert list(expected) == [1, 2, 3, 4, 5, 6]
    answers = []
    for name, first, second in moments:
        assert first is not None, f"{name}: it was killed, or failed"
        answers.append(first[1])
        assert second[1] is None
        assert metrics(tmp_path / name) == expected, name
        assert metrics(tmp_path / name, "eval_loss") == metrics(tmp_path / "whole", "eval_loss"), name
        there = [path.name for path in (tmp_path / name / "checkpoints").iterdir()]
        assert not [file for file in there if file.startswith(".")], (name, there)
        assert committed(tmp_path / name / "checkpoints")[-1].step == 6
    assert set(answers) == {"SIGTERM", None}  # None: after the last step, and so finished
    assert answers.index(None) > len(answers) // 2


pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")
