"""Ranks are killed at random moments of a save: what was committed before is there, whole, and loads."""

import json
import multiprocessing
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from fsdp_utils import (
    CheckpointError,
    export_safetensors,
    load_distributed,
    load_full,
    save_distributed,
    save_full,
    verify_checkpoint,
)
from fsdp_utils.checkpoint.manifest import committed
from fsdp_utils.distributed.launch import _PRELOAD
from tests.checkpoints import outcome

MOMENTS = 20
WAIT_S = 10.0  # for a rank that was killed before it entered
LIMIT_S = 60.0  # far more than anything here takes


def model_and_optimizer(*, sharded: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
    """8 MiB with its optimizer's state."""
    model = nn.Sequential(*[nn.Linear(342, 1024) for _ in range(2)])
    if sharded:
        fully_shard(model)
    return model, torch.optim.AdamW(model.parameters())


def fill(model: nn.Module, optimizer: torch.optim.Optimizer, value: int) -> None:
    """Let every number of the state be that value."""
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(value)
            optimizer.state[param] = {
                "step": torch.tensor(float(value)),
                "exp_avg": torch.full_like(param, value),
                "exp_avg_sq": torch.full_like(param, value),
            }


def saver(rank: int, store: Path, folder: Path, first: int, asynchronous: bool, pipe: Connection) -> None:
    """One rank: saves step after step, and says so, until it is killed or loses the other."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=timedelta(seconds=LIMIT_S)
    )
    model, optimizer = model_and_optimizer(sharded=True)
    try:
        for step in range(first, first + 1000):
            fill(model, optimizer, step)
            pipe.send(("begins", step))
            save = save_distributed(
                folder, model, optimizer, step=step, keep=2, asynchronous=asynchronous, wait_s=WAIT_S, at=step
            )
            if not asynchronous:
                save.wait()
                pipe.send(("saved", step))
            elif step > first:
                pipe.send(("saved", step - 1))  # the call has waited for the one before it
    except CheckpointError as error:
        pipe.send(("CheckpointError", str(error)))
    os._exit(0)


class Savers:
    """Two ranks that save."""

    def __init__(self, folder: Path, first: int, *, asynchronous: bool) -> None:
        context = multiprocessing.get_context("forkserver")
        self.store = Path(tempfile.mkdtemp()) / "store"
        self.processes, self.pipes, self.heard = [], [], [[], []]
        for rank in range(2):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(
                target=saver, args=(rank, self.store, folder, first, asynchronous, theirs)
            )
            process.start()
            theirs.close()
            self.processes.append(process)
            self.pipes.append(ours)

    def hear(self, rank: int, word: str, *, wait_s: float = LIMIT_S) -> bool:
        """Listen to that rank until it says the word; False when it has not within that time, or has gone."""
        limit = time.monotonic() + wait_s
        while self.pipes[rank].poll(max(0.0, limit - time.monotonic())):
            try:
                self.heard[rank].append(self.pipes[rank].recv())
            except EOFError:
                return False
            if self.heard[rank][-1][0] == word:
                return True
        return False

    def kill(self, ranks: list[int]) -> None:
        for rank in ranks:
            pid = self.processes[rank].pid
            assert pid is not None
            os.kill(pid, signal.SIGKILL)

    def end(self) -> None:
        for process in self.processes:
            process.kill()
            process.join(LIMIT_S)


@pytest.fixture(scope="module")
def forkserver() -> None:
    multiprocessing.get_context("forkserver").set_forkserver_preload([*_PRELOAD, "fsdp_utils.checkpoint"])


@pytest.mark.timeout(600)  # half a minute on an idle machine
@pytest.mark.skipif(os.name == "nt", reason="no SIGKILL")
def test_ranks_are_killed_at_random_moments(tmp_path: Path, forkserver: None) -> None:
    chance = random.Random(4)
    last, moments = 0, []
    for moment in range(MOMENTS):
        asynchronous, doomed = moment % 4 == 3, [[0], [1], [0, 1]][moment % 3]
        savers = Savers(tmp_path, last + 1, asynchronous=asynchronous)
        try:
            for word in ("begins", "begins"):  # the first save is slower: it connects the ranks
                start = time.monotonic()
                assert all(savers.hear(rank, word) for rank in range(2)), savers.heard
            seconds_per_save = time.monotonic() - start
            moments.append(chance.uniform(0.0, 1.1))  # anywhere in the save that has just begun
            time.sleep(moments[-1] * seconds_per_save)
            savers.kill(doomed)
            for rank in {0, 1} - set(doomed):
                assert savers.hear(rank, "CheckpointError"), f"rank {rank} hangs: {savers.heard[rank]}"
            for rank in range(2):
                savers.hear(rank, "end", wait_s=0)
        finally:
            savers.end()

        told = max((step for heard in savers.heard for kind, step in heard if kind == "saved"), default=last)
        there = [one.step for one in committed(tmp_path)]
        assert told <= there[-1], f"step {told} was saved, and is lost: {there}"
        # Killed between the commit and the word; an asynchronous save is told by the call after it.
        assert there[-1] <= told + (2 if asynchronous else 1)
        verify_checkpoint(tmp_path)
        model, optimizer = model_and_optimizer(sharded=False)
        fill(model, optimizer, -1)
        state = load_distributed(tmp_path, model, optimizer)
        last = state["step"]
        assert last == there[-1]
        assert state["at"] == last
        for param in model.parameters():
            for tensor in (param, *optimizer.state[param].values()):
                assert (tensor == last).all(), "two steps are mixed"


# ---- between any two operations on files -------------------------------------------------------------------

CHANGES_FILES = ("os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.truncate", "fsync")


def die_before(operation: int, folder: Path) -> None:
    """Let this process be killed before the operation with that number (from 0) on a file in the folder."""
    left = [operation]

    def before(event: str, arguments: tuple[object, ...]) -> None:
        writes = (
            event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)
        )
        if event == "fsync" or (
            (writes or event in CHANGES_FILES) and str(arguments[0]).startswith(str(folder))
        ):
            left[0] -= 1
            if left[0] < 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sync = os.fsync
    os.fsync = lambda descriptor: (before("fsync", ()), sync(descriptor))[1]  # has no audit event
    sys.addaudithook(before)


class One(nn.Module):
    """A model whose every number is the same."""

    def __init__(self, value: int) -> None:
        super().__init__()
        self.a, self.b = (nn.Parameter(torch.full((2, 300), float(value))) for _ in range(2))

    def value(self) -> int:
        values = set(torch.cat([self.a, self.b]).reshape(-1).tolist())
        assert len(values) == 1, f"mixed: {values}"
        return int(values.pop())


def save_one(how: str, folder: Path, value: int) -> None:
    if how == "save_distributed":
        save_distributed(folder, One(value), step=value, keep=1, at=value)
    elif how == "save_full":
        save_full(folder / "one.pt", One(value), at=value)
    else:
        source = folder.parent / f"{value}.pt"
        export_safetensors(source, folder, shard_gib=1 / 2**30 if how == "export" else 1.0)


def load_one(how: str, folder: Path) -> int | None:
    """What is there: None where a reader is told that there is nothing."""
    model = One(0)
    if how.startswith("save"):
        path = folder if how == "save_distributed" else folder / "one.pt"
        verify_checkpoint(path)
        state = (load_distributed if how == "save_distributed" else load_full)(path, model)
        assert state["at"] == model.value()
    else:
        index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
        if single.exists():  # as transformers looks for them
            files = [single.name]
        elif index.exists():
            files = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        else:
            return None
        tensors: dict[str, Tensor] = {}
        for file in files:
            tensors |= load_file(folder / file)
        model.load_state_dict(tensors)
    return model.value()


def kill_at_each_operation(how: str, folder: Path, pipe: Connection) -> None:
    """In a process of its own, which forks those that are killed."""
    found: list[int | None] = []
    first, how = ("export in one file", "export") if how == "export after one file" else (how, how)
    os.fsync = lambda descriptor: None  # what was written outlives a process in any case
    try:
        for operation in range(200):
            there = folder / str(operation) / "there"
            there.mkdir(parents=True)
            for value in (1, 2, 3):
                save_full(there.parent / f"{value}.pt", One(value))
            first = "export in one file" if how == "export after one file" else how
            save_one(first, there, 1)
            pid = os.fork()
            if pid == 0:
                die_before(operation, there)
                save_one(how, there, 2)
                os._exit(0)
            killed = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) != 0
            found.append(load_one(how, there))
            assert found[-1] == 2 or killed, "saved, and not there"
            save_one(how, there, 3)
            assert load_one(how, there) == 3
            left = [path.name for path in there.iterdir() if path.name.startswith(".")]
            assert not left, f"left after a death before operation {operation}: {left}"
            if not killed:
                break
        pipe.send(found)
    except BaseException as error:
        pipe.send(f"{len(found) - 1}: {type(error).__name__}: {error}")
        raise


@pytest.mark.skipif(os.name == "nt", reason="no SIGKILL")
@pytest.mark.parametrize(
    "how", ["save_distributed", "save_full", "export in one file", "export", "export after one file"]
)
def test_a_death_between_any_two_operations_leaves_the_old_or_the_new(
    how: str, tmp_path: Path, forkserver: None
) -> None:
    context = multiprocessing.get_context("forkserver")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=kill_at_each_operation, args=(how, tmp_path, theirs))
    process.start()
    theirs.close()
    try:
        assert ours.poll(LIMIT_S)
        found = ours.recv()
    finally:
        process.kill()
        process.join(LIMIT_S)
    assert isinstance(found, list), found
    told = [value for value in found if value is not None]
    assert told == sorted(told)
    assert told[0] == 1
    assert told[-1] == 2
    assert len(told) == len(found) or how.startswith("export"), found
    assert len(found) > 3


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/proc names the open files")
def test_every_new_name_is_durable_before_anything_else_happens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (1, 2):
        save_one("save_distributed", tmp_path, step)
    happened: list[str] = []
    rename, sync, delete = Path.rename, os.fsync, shutil.rmtree

    def note(what: str, path: object) -> None:
        happened.append(f"{what} {str(path).replace(str(tmp_path), 'home')}")

    monkeypatch.setattr(Path, "rename", lambda path, to: (note("name", to), rename(path, to))[1])
    monkeypatch.setattr(
        os, "fsync", lambda file: (note("sync", Path(f"/proc/self/fd/{file}").readlink()), sync(file))[1]
    )
    monkeypatch.setattr(shutil, "rmtree", lambda path, **how: (note("delete", path), delete(path, **how))[1])
    save_one("save_distributed", tmp_path, 3)
    manifest = next(index for index, one in enumerate(happened) if one.endswith("manifest.json"))
    synced = [Path(one) for one in happened[:manifest] if one.startswith("sync")]
    assert {path.suffix or path.name for path in synced} == {".distcp", ".metadata"}, "data and description"
    assert happened[manifest + 1].startswith("sync home/.saving-"), "the directory of them"
    assert happened[manifest + 2 :] == [
        "name home/000003-step-3",
        "sync home",
        "name home/.deleting-000002-step-2",
        "sync home",
        "delete home/.deleting-000002-step-2",
    ]


# ---- several programs at once ------------------------------------------------------------------------------


def save_and_say(folder: Path, steps: range, pipe: Connection) -> None:
    outcomes = [outcome(partial(save_one, "save_distributed", folder, step)) for step in steps]
    pipe.send([one.error for one in outcomes if one.error])  # the other one may have saved all of the time
    pipe.close()


def test_two_programs_that_keep_one_never_show_a_reader_a_mixture(tmp_path: Path, forkserver: None) -> None:
    save_one("save_distributed", tmp_path, 1)
    context = multiprocessing.get_context("forkserver")
    ends, processes = [], []
    for steps in (range(2, 8), range(102, 108)):
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=save_and_say, args=(tmp_path, steps, theirs))
        process.start()
        theirs.close()
        ends.append(ours)
        processes.append(process)
    loaded, refused = [], []
    limit = time.monotonic() + LIMIT_S
    try:
        while not all(end.poll() for end in ends):
            assert time.monotonic() < limit
            try:
                loaded.append(load_one("save_distributed", tmp_path))
            except CheckpointError as error:  # it was deleted meanwhile
                refused.append(str(error))
        told = [text for end in ends for text in end.recv()]
    finally:
        for process in processes:
            process.kill()
            process.join(LIMIT_S)
    assert loaded or refused
    assert all(": expected" in text and ", found" in text for text in refused), refused
    assert all(": expected to be the only program that saves there, found" in text for text in told), told
    assert load_one("save_distributed", tmp_path) in (*range(2, 8), *range(102, 108))
    assert len(list(tmp_path.iterdir())) == 1
