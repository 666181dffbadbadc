"""A run that is stopped, killed, damaged, or without room on its disk loses no step, and says so."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import chaos
from fsdp_utils import CheckpointError, get_rank, run_on_ranks
from fsdp_utils.train import ConfigError, NotFinite, Progress, rows_at, train
from tests.on_ranks import one_rank
from tests.training_runs import STEPS, after_step, alone, configured, events, metrics, run, saved

ROOT = Path(__file__).resolve().parent.parent
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def damage(checkpoint: Path) -> None:
    """One bit of its largest file."""
    file = max(checkpoint.iterdir(), key=lambda file: file.stat().st_size)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


# ---- on two ranks ----------------------------------------------------------------------------------


def scenes(out: Path) -> dict[str, Any]:
    def fails(kind: type[Exception], name: str, source: str, **settings: Any) -> str:
        with pytest.raises(kind) as caught:
            run(out / name, source, **settings)
        return str(caught.value)

    found: dict[str, Any] = {"whole": run(out / "whole")}
    with after_step(3, lambda: os.kill(os.getpid(), signal.SIGUSR1) if get_rank() == 1 else None):
        found["stopped"] = train(configured(out / "stopped"))
    if get_rank() == 0:
        for step in (STEPS - 2, STEPS):
            damage(saved(out / "whole")[step])
    torch.distributed.barrier()
    found["damaged"] = run(out / "whole")
    found["nan"] = fails(NotFinite, "nan", "poisoned")
    found["nan loss"] = fails(NotFinite, "nan loss", "poisoned_loss", save_every=1)
    found["another model"] = fails(CheckpointError, "whole", "another_model", steps=2 * STEPS)
    return found


Told = tuple[list[dict[str, Any]], Path]


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Told:
    out = tmp_path_factory.mktemp("runs")
    return run_on_ranks(scenes, out, world_size=2), out


def test_a_signal_to_one_rank_stops_all_at_the_same_step_and_saves_it(told: Told) -> None:
    (first, second), out = told
    step = first["stopped"].step
    assert first["stopped"] == second["stopped"] == Progress(step, 8 * step, stopped=True)
    assert 3 <= step < STEPS
    assert list(saved(out / "stopped"))[-1] == step
    assert [event["step"] for event in events(out / "stopped", "stopped")] == [step]
    resumed = alone(out / "stopped")  # and goes on without a seam on another number of ranks
    assert list(resumed) == list(range(1, STEPS + 1))
    assert resumed == pytest.approx(first["whole"], rel=1e-4)


def test_damaged_checkpoints_are_passed_over_until_one_is_whole(told: Told) -> None:
    (found, _), out = told
    assert found["damaged"] == found["whole"]  # the same ranks: to the bit
    last, before = (event["error"] for event in events(out / "whole", "damaged"))
    assert (f"step-{STEPS}" in last, f"step-{STEPS - 2}" in before) == (True, True)
    assert events(out / "whole", "started")[1]["step"] == STEPS - 4


def test_a_checkpoint_of_another_model_is_refused_on_all_ranks_and_stays(told: Told) -> None:
    (first, second), out = told
    assert first["another model"] == second["another model"]
    assert "head.bias" in first["another model"]
    assert list(saved(out / "whole"))[-1] == STEPS


def test_a_number_that_is_none_ends_the_run_on_all_ranks_and_its_samples_are_named(told: Told) -> None:
    """Sample 5 is the bad one; the checkpoints are from before."""
    (first, second), out = told
    for name, norm in (("nan", "nan"), ("nan loss", r"\d\.\d+")):
        assert first[name] == second[name]
        sentence = (
            rf"step (\d+): the loss is nan, the gradient's norm {norm}; "
            r"the loss of rank (\d) is nan .samples ([\d, ]+)"
        )
        named = re.match(sentence, first[name])
        assert named
        step, rank, samples = int(named[1]), int(named[2]), [int(sample) for sample in named[3].split(", ")]
        assert 5 in samples
        assert samples == rows_at(8 * (step - 1), 8, 24, seed=0).view(2, 4)[rank].tolist()
        assert max(saved(out / name), default=0) < step
        assert torch.isfinite(torch.tensor([*metrics(out / name).values()])).all()


# ---- saves that fail, and a full disk --------------------------------------------------------------


def test_a_save_that_fails_is_told_and_ends_nothing_but_the_last(tmp_path: Path) -> None:
    folder, aside = tmp_path / "run" / "checkpoints", tmp_path / "aside"

    def take_away() -> None:
        for thread in threading.enumerate():
            if thread.name.startswith("save "):  # committed is not over: what `keep` removes comes after
                thread.join(timeout=30)
        assert 2 in saved(tmp_path / "run")
        folder.rename(aside)
        folder.write_text("not a folder")

    def bring_back() -> None:
        folder.unlink()
        aside.rename(folder)

    with after_step(3, take_away), after_step(7, bring_back):
        alone(tmp_path / "run", steps=9, decay="none")
    assert [event["step"] for event in events(tmp_path / "run", "failed to save")] == [4, 6]
    assert [event["step"] for event in events(tmp_path / "run", "saved")] == [2, 8, 9]

    with after_step(2, take_away), pytest.raises(CheckpointError):  # the last: the run has not ended well
        alone(tmp_path / "run", steps=11, decay="none")
    bring_back()
    resumed = alone(tmp_path / "run", steps=11, decay="none")
    assert resumed == pytest.approx(alone(tmp_path / "whole", steps=11, decay="none"), rel=1e-6)
    assert list(saved(tmp_path / "run"))[-1] == 11


@pytest.mark.skipif(not chaos.can_fill_a_disk(), reason="it takes root to fill a disk of its own")
def test_a_full_disk_costs_no_line_and_no_step(
    tmp_path: Path, capfd: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "disk"
    few: dict[str, Any] = {"save_every": 50, "eval_every": 50}
    with chaos.small_disk(out), contextlib.ExitStack() as full:

        def fill() -> None:
            full.enter_context(chaos.full_disk(out))

        def free() -> None:
            full.close()
            monkeypatch.undo()

        with (out / "log").open("w", buffering=1) as log:  # as sbatch's file is that lies beside the run
            monkeypatch.setattr(sys, "stderr", log)
            with after_step(5, fill), after_step(45, free):  # more lines than what is left of a block
                alone(out, steps=60, **few)
        assert list(metrics(out)) == list(range(1, 61))

        with after_step(5, fill), pytest.raises(CheckpointError, match="No space left"):
            alone(out, steps=100, **few)
        shown = capfd.readouterr().err
        assert shown.count("No space left on device; the run goes on") == 1
        assert '"step": 100' in shown.partition("never written:")[2]
        free()
        assert list(alone(out, steps=100, **few)) == list(range(1, 101))


# ---- asked to stop, alone in its directory ----------------------------------------------------------------


def start(out: Path) -> "subprocess.Popen[str]":
    """The program on one rank, with a child that outlives it, when it has trained four steps."""
    command = [sys.executable, "-m", "fsdp_utils.train", f"--out={out}", "--save_every=2", "--steps=500"]
    command += ["--data.source=tests.tiny_training:forking", "--data.batch_size=8", "--parallel.device=cpu"]
    running = subprocess.Popen(
        command, env=ENVIRONMENT, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
    )
    while len(metrics(out)) < 4:
        if running.poll() is not None:
            raise RuntimeError(running.communicate()[1])
        time.sleep(0.05)
    return running


def begin(out: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        run(out)
    return str(caught.value)


def test_a_second_run_is_refused_until_the_first_is_asked_to_stop_saves_and_ends_with_75(
    tmp_path: Path,
) -> None:
    first = start(tmp_path)
    try:
        refused = run_on_ranks(begin, tmp_path, world_size=2)
        first.send_signal(signal.SIGTERM)
        shown = first.communicate(timeout=60)[1]
    finally:
        first.kill()
        first.communicate()
    assert refused[0] == refused[1]
    assert f"out: expected a directory to write to for this run alone, found {tmp_path}" in refused[0]
    assert "found process " in refused[0]
    assert first.returncode == 75, shown[-3000:]
    last = max(metrics(tmp_path))
    assert list(saved(tmp_path))[-1] == last
    assert list(alone(tmp_path, "slow", steps=last + 1)) == list(range(1, last + 2))


def test_asked_at_any_moment_it_saves_and_goes_on_without_a_seam(tmp_path: Path) -> None:
    """SIGTERM comes at one of the forwards and files of a run, which are counted in a first one.

    Files of a save in the background may be counted later than there, but those of step 2 not after step 4.
    """
    watched, count, signal_at, in_time = "", 0, 0, 0

    def happened(event: str, arguments: tuple[object, ...]) -> None:
        nonlocal count
        is_file = event in ("open", "os.rename", "os.mkdir") and str(arguments[0]).startswith(watched)
        if watched and (is_file or event == "tests.forward"):
            count += 1
            if count == signal_at and signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
                os.kill(os.getpid(), signal.SIGTERM)

    def four_steps() -> None:
        nonlocal in_time
        in_time = count

    def stopped(out: Path, at: int) -> bool:
        nonlocal watched, count, signal_at
        watched, count, signal_at = str(out), 0, at
        with one_rank():
            progress = train(configured(out, steps=6))
        watched = ""  # a hook for audits stays
        return progress.stopped

    sys.addaudithook(happened)
    with after_step(4, four_steps):
        assert not stopped(tmp_path / "whole", 0)
    assert in_time > 10
    for moment in (1, in_time // 2, in_time, count - 1):
        out = tmp_path / f"at {moment}"
        was_stopped = stopped(out, moment)  # in the last step or later it ends by itself
        assert was_stopped or moment > in_time
        assert not stopped(out, 0)
        for name in ("loss", "eval_loss"):
            assert metrics(out, name) == metrics(tmp_path / "whole", name), out
        assert list(metrics(out)) == [1, 2, 3, 4, 5, 6]
        assert not [path for path in (out / "checkpoints").iterdir() if path.name.startswith(".")]
        assert list(saved(out))[-1] == 6
