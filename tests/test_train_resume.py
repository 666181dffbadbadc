"""What a run keeps when it goes on, what it takes from the new settings, and that it is alone."""

import contextlib
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from fsdp_utils import run_on_ranks
from fsdp_utils.checkpoint.files import Lock
from fsdp_utils.train import checkpoints
from fsdp_utils.train import loop as program
from fsdp_utils.train.checkpoints import lock_directory
from fsdp_utils.train.config import ConfigError, OptimConfig, TrainConfig, changes
from fsdp_utils.train.metrics import RunLog
from tests.training_runs import configured, events, metrics, run

ROOT = Path(__file__).resolve().parent.parent

# ---- settings --------------------------------------------------------------------------------------


def told_and_used(config: TrainConfig) -> tuple[list[str], dict[str, Any]]:
    """What a run says, and what its optimizer was told at its last step."""
    made, told = [], []

    def making(*arguments: Any) -> Any:
        made.append(build(*arguments))
        return made[-1]

    build, say = program._optimizer, RunLog.say
    program._optimizer, RunLog.say = making, lambda log, text: told.append(text)
    try:
        program.train(config)
    finally:
        program._optimizer, RunLog.say = build, say
    (group,) = made[0].param_groups
    return told, {name: value for name, value in group.items() if name != "params"}


def scenes(out: Path) -> dict[str, Any]:
    def config(steps: int, **optim: Any) -> TrainConfig:
        one = configured(out / optim.get("name", "adamw"), steps=steps)
        one.optim = OptimConfig(**optim)
        return one

    found = {"first": told_and_used(config(2)), "same": told_and_used(config(2))}
    found["changed"] = told_and_used(config(4, weight_decay=0.0, betas=(0.5, 0.6), lr=0.5, clip=None))
    child = {"name": "child_tuning"}
    told_and_used(config(2, **child))
    found["child"] = told_and_used(config(4, **child, reserve_p=0.9, weight_decay=0.3))
    return found


@pytest.fixture(scope="module")
def resumed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_on_ranks(scenes, tmp_path_factory.mktemp("runs"), world_size=2)[0]


def test_changed_settings_of_the_optimizer_hold_from_there_on_and_are_told(resumed: dict[str, Any]) -> None:
    told, group = resumed["changed"]
    assert (group["weight_decay"], tuple(group["betas"])) == (0.0, (0.5, 0.6))
    (line,) = [line for line in told if "other settings" in line]
    assert line == (
        "from step 2 on with other settings than before: optim.betas (0.9, 0.95) -> (0.5, 0.6), "
        "optim.clip 1.0 -> None, optim.lr 0.0003 -> 0.5, optim.weight_decay 0.1 -> 0.0, steps 2 -> 4"
    )
    _, group = resumed["child"]
    assert (group["reserve_p"], group["weight_decay"], tuple(group["betas"])) == (0.9, 0.3, (0.9, 0.95))


def test_nothing_is_told_where_nothing_has_changed(resumed: dict[str, Any]) -> None:
    for scene in ("first", "same"):
        assert not [line for line in resumed[scene][0] if "other settings" in line or "bf16" in line]


def test_changes_are_named() -> None:
    before = {"steps": 3, "optim": {"lr": 0.1, "betas": (0.9, 0.95)}, "gone": 1}
    now = {"steps": 4, "optim": {"lr": 0.1, "betas": [0.9, 0.95]}, "new": None}
    assert changes(before, now) == ["gone 1 -> None", "steps 3 -> 4"]


# ---- alone -----------------------------------------------------------------------------------------


@contextlib.contextmanager
def closing_lock(out: Path) -> Iterator[Lock]:
    lock = lock_directory(out)
    try:
        yield lock
    finally:
        lock.release()


def begin(out: Path) -> dict[str, Any]:
    checkpoints._LOCK_WAIT_S = 0.5
    begun = time.monotonic()
    with pytest.raises(ConfigError) as caught:
        run(out, steps=2)
    return {"told": str(caught.value), "seconds": time.monotonic() - begun}


def test_a_second_run_in_a_directory_is_refused_on_all_ranks_and_changes_nothing(tmp_path: Path) -> None:
    with closing_lock(tmp_path):  # this process is the first run
        first, second = run_on_ranks(begin, tmp_path, world_size=2)
        assert [file.name for file in tmp_path.iterdir()] == [".lock"]
    assert first["told"] == second["told"]
    assert (
        f"no other run is going on, found {tmp_path} is in use by process {os.getpid()} on" in first["told"]
    )
    assert "choose another --out" in first["told"]
    assert first["seconds"] < 10
    losses = run_on_ranks(run, tmp_path, "counting", world_size=1)  # and free again
    assert len(losses[0]) == 40


OWNER = """
import os, sys, time
from pathlib import Path
from fsdp_utils.train.checkpoints import lock_directory
from fsdp_utils.train.metrics import RunLog
lock = lock_directory(Path(sys.argv[1]))
if os.fork() == 0:  # a child that outlives its parent
    os.setsid()
    sys.stdout.close()
    os.close(1)
    time.sleep(60)
    os._exit(0)
print("taken", flush=True)
time.sleep(60)
"""


def test_a_killed_owner_leaves_no_lock_though_a_child_of_it_lives_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoints, "_LOCK_WAIT_S", 0.5)
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(tmp_path)],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        start_new_session=True,
    )
    try:
        assert owner.stdout is not None
        assert owner.stdout.readline() == b"taken\n"
        with pytest.raises(ConfigError, match=f"in use by process {owner.pid} on .*, since 20"):
            lock_directory(tmp_path)
        owner.send_signal(signal.SIGKILL)
        owner.wait()
        begun = time.monotonic()
        lock_directory(tmp_path).release()
        assert time.monotonic() - begun < 1
    finally:
        owner.kill()
        owner.communicate()


def test_where_there_are_no_locks_it_goes_on_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(fcntl, "flock", fail)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        told, _ = told_and_used(configured(tmp_path, steps=2))
    finally:
        dist.destroy_process_group()
    assert [line for line in told if "cannot be locked here (the file system has no locks)" in line]
    assert events(tmp_path)[-1] == "finished"


@pytest.mark.parametrize("kind", ["a file", "a link"])
def test_a_directory_that_cannot_be_used_is_named(tmp_path: Path, kind: str) -> None:
    out = tmp_path / "out"
    if kind == "a file":
        out.write_text("mine")
    else:
        out.mkdir()
        (tmp_path / "elsewhere").write_text("mine")
        (out / ".lock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="out: expected a directory to write to, found"):
        lock_directory(out)
    assert "mine" in {file.read_text() for file in (tmp_path / "elsewhere", out) if file.is_file()}


def test_the_owner_s_name_takes_the_place_of_a_longer_one(tmp_path: Path) -> None:
    (tmp_path / ".lock").write_text("x" * 1000)
    with closing_lock(tmp_path):
        assert json.loads((tmp_path / ".lock").read_text())["process"] == os.getpid()


@pytest.mark.parametrize("content", ["", "null", "[1]", '{"process": 1}', "\0"])
def test_an_owner_that_left_no_name_is_still_one(
    tmp_path: Path, content: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoints, "_LOCK_WAIT_S", 0.0)
    with closing_lock(tmp_path):
        (tmp_path / ".lock").write_text(content)
        with pytest.raises(ConfigError, match="is in use by another program"):
            lock_directory(tmp_path)


def test_two_programs_one_after_the_other(tmp_path: Path) -> None:
    """Exit codes and what is left, of a whole second program while the first is at it."""
    code = "import sys; from fsdp_utils.train import checkpoints, loop; checkpoints._LOCK_WAIT_S = 0.5; "
    command = [
        sys.executable,
        "-c",
        code + "sys.exit(loop.main())",
        f"--out={tmp_path}",
        "--parallel.device=cpu",
    ]
    command += ["--data.source=tests.tiny_training:slow", "--data.batch_size=8", "--steps=80"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    first = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)
    try:
        while not (tmp_path / "events.jsonl").exists():
            assert first.poll() is None
            time.sleep(0.05)
        second = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
        assert second.returncode == 2, second.stderr
        assert second.stderr.startswith("ConfigError: out: expected a directory in which no other run is")
        assert first.wait(timeout=60) == 0
    finally:
        first.kill()
        first.wait()
    assert list(metrics(tmp_path)) == list(range(1, 81))
