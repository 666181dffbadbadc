"""A save that is cut short by SIGKILL, and two programs at once: what was saved is there, whole."""

import json
import multiprocessing
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.distributed.fsdp import fully_shard

from benchmarks.attacks import fill, holds
from fsdp_utils import export_safetensors, load_distributed, save_distributed, verify_checkpoint
from fsdp_utils.checkpoint import CheckpointError, checkpoints
from fsdp_utils.pretrained import load_pretrained

WAIT_S = 5.0  # for a rank that was killed before it entered
LIMIT_S = 60.0  # far more than anything here takes


class Child:
    """A process that tells what it does."""

    def __init__(self, fn: Callable[..., object], *arguments: Any) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch.distributed.fsdp", "fsdp_utils.checkpoint", __name__])
        self._pipe, theirs = context.Pipe(duplex=False)
        self.process = context.Process(target=fn, args=(*arguments, theirs))
        self.process.start()
        theirs.close()
        self.heard: list[Any] = []

    def hear(self, word: str, *, wait_s: float = LIMIT_S) -> bool:
        """Listen until it says something that begins with the word; False if it does not, or has gone."""
        limit = time.monotonic() + wait_s
        try:
            while self._pipe.poll(max(0.0, limit - time.monotonic())):
                self.heard.append(self._pipe.recv())
                if self.heard[-1][0] == word:
                    return True
        except EOFError:
            pass
        return False

    def kill(self) -> None:
        self.process.kill()
        self.process.join(LIMIT_S)


@contextmanager
def children(*calls: tuple[Any, ...]) -> Iterator[list[Child]]:
    started = [Child(*call) for call in calls]
    try:
        yield started
    finally:
        for child in started:
            child.kill()


# ---- at random moments -------------------------------------------------------------------------------------


def model_and_optimizer() -> tuple[nn.Module, torch.optim.Optimizer]:
    """12 MiB, with its optimizer's state."""
    model: nn.Module = nn.Linear(512, 2048)
    if dist.is_initialized():
        fully_shard(model)
    return model, torch.optim.AdamW(model.parameters())


def saver(rank: int, port: int, folder: Path, first: int, asynchronous: bool, pipe: Connection) -> None:
    """One rank: saves step after step, and says so, until it is killed or loses the other."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    limit = timedelta(seconds=LIMIT_S)
    store = dist.TCPStore("127.0.0.1", port, timeout=limit)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=limit)
    model, optimizer = model_and_optimizer()
    options: dict[str, Any] = {"keep": 2, "asynchronous": asynchronous, "wait_s": WAIT_S}
    try:
        for step in range(first, first + 1000):
            fill(model, optimizer, step)
            pipe.send(("begins", step))
            save = save_distributed(folder, model, optimizer, step=step, state={"at": step}, **options)
            if not asynchronous:
                save.wait()
                pipe.send(("saved", step))
            elif step > first:
                pipe.send(("saved", step - 1))  # the call has waited for the one before it
    except CheckpointError as error:
        pipe.send(("CheckpointError", str(error)))
    os._exit(0)


@pytest.mark.timeout(300)  # ten seconds on an idle machine
def test_ranks_are_killed_at_random_moments(tmp_path: Path) -> None:
    chance, last = random.Random(4), 0
    for doomed, asynchronous in (({0}, False), ({1}, False), ({1}, True)):
        # Not a FileStore: a record that a killed rank leaves half written holds its readers for ever.
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        calls = [(saver, rank, store.port, tmp_path, last + 1, asynchronous) for rank in range(2)]
        with children(*calls) as ranks:
            start = time.monotonic()
            for _ in range(2):  # the first save is slower: it connects the ranks
                start = time.monotonic()
                assert all(child.hear("begins") for child in ranks), [child.heard for child in ranks]
            # anywhere in the save that has just begun
            time.sleep(chance.uniform(0.0, 1.1) * (time.monotonic() - start))
            for rank in doomed:
                ranks[rank].process.kill()
            for rank in {0, 1} - doomed:
                assert ranks[rank].hear("CheckpointError"), f"rank {rank} hangs: {ranks[rank].heard}"
            for child in ranks:
                child.hear("end", wait_s=0)

        told = max((step for child in ranks for word, step in child.heard if word == "saved"), default=last)
        there = list(checkpoints(tmp_path))
        assert told <= there[-1], f"step {told} was saved, and is lost: {there}"
        # Killed between the commit and the word; an asynchronous save is told by the call after it.
        assert there[-1] <= told + (2 if asynchronous else 1)
        verify_checkpoint(tmp_path)
        model, optimizer = model_and_optimizer()
        state = load_distributed(tmp_path, model, optimizer)
        last = state["step"]
        assert last == state["at"] == there[-1]
        assert holds(model, optimizer, last), "two steps are mixed"


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


def save_one(folder: Path, value: int) -> None:
    save_distributed(folder, One(value), step=value, keep=1, state={"at": value}).wait()


def load_one(folder: Path) -> int:
    verify_checkpoint(folder)
    model = One(0)
    assert load_distributed(folder, model)["at"] == model.value()
    return model.value()


def in_two_files(folder: Path, value: int) -> None:
    """As transformers writes larger models."""
    for name, tensor in One(value).state_dict().items():
        save_file({name: tensor}, folder / f"{name}.safetensors")
    index = {"weight_map": {name: f"{name}.safetensors" for name in ("a", "b")}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def export_one(folder: Path, value: int) -> None:
    export_safetensors(folder.parents[1] / f"source {value}", folder)


def load_exported(folder: Path) -> int | None:
    """Load what is there; None where there is nothing."""
    if not list(folder.glob("model.safetensors*")):
        return None
    load_pretrained(folder, model := One(0))
    return model.value()


Write = Callable[[Path, int], None]
WAYS: dict[str, tuple[Write, Write, Callable[[Path], int | None]]] = {  # first, then, how it is read
    "save_distributed": (save_one, save_one, load_one),
    "export": (in_two_files, export_one, load_exported),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_death_between_any_two_operations_leaves_the_old_or_the_new(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, then, load = WAYS[way]
    monkeypatch.setattr(os, "fsync", lambda _: None)  # what was written outlives a process in any case
    for value in (2, 3):
        save_one(tmp_path / f"source {value}", value)
    found: list[int | None] = []
    killed = True
    while killed:
        there = tmp_path / str(len(found)) / "there"
        there.mkdir(parents=True)
        first(there, 1)
        if (pid := os.fork()) == 0:
            try:
                die_before(len(found), there)
                then(there, 2)
                os._exit(0)
            finally:
                os._exit(1)
        killed = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) != 0
        found.append(load(there))
        assert found[-1] == 2 or killed, "saved, and not there"
        then(there, 3)
        assert load(there) == 3
        left = [path.name for path in there.iterdir() if path.name.startswith(".")]
        assert not left, f"left after a death before operation {len(found) - 1}: {left}"
    told = [value for value in found if value is not None]
    assert told == sorted(told)
    assert {*told} == {1, 2}
    assert len(told) == len(found) or way == "export", found
    assert len(found) > 3


def test_every_new_name_is_durable_before_anything_else_happens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (1, 2):
        save_one(tmp_path, step)
    happened: list[str] = []
    rename, sync, delete = Path.rename, os.fsync, shutil.rmtree

    def note(what: str, path: object) -> None:
        happened.append(f"{what} {str(path).replace(str(tmp_path), 'home')}")

    monkeypatch.setattr(
        Path, "rename", lambda path, to, **how: (note("name", to), rename(path, to, **how))[1]
    )
    monkeypatch.setattr(
        os, "fsync", lambda file: (note("sync", Path(f"/proc/self/fd/{file}").readlink()), sync(file))[1]
    )
    monkeypatch.setattr(
        shutil,
        "rmtree",
        lambda path, **how: (path.exists() and note("delete", path), delete(path, **how))[1],
    )
    save_one(tmp_path, 3)
    manifest = next(index for index, one in enumerate(happened) if one.endswith("manifest.json"))
    synced = {Path(one).name for one in happened[:manifest] if one.startswith("sync")}
    assert synced == {"rank-00000.safetensors"}, "what the manifest names"
    assert happened[manifest + 1].startswith("sync home/.saving-"), "the directory of them"
    assert happened[manifest + 2 :] == [
        "name home/000003-step-3",
        "sync home",
        "name home/.deleting-000002-step-2",
        "sync home",
        "delete home/.deleting-000002-step-2",
    ]


# ---- several programs at once ------------------------------------------------------------------------------


def hold(directory: Path, pipe: Connection) -> None:
    """Save until the last moment before the commit, and stay there."""

    def stay(*_: object, **__: object) -> None:
        (directory / ".saving-lock").open().close()  # as a copy of the directory does
        pipe.send(("is saving",))
        time.sleep(LIMIT_S)

    Path.rename = stay
    save_one(directory, 7)


def test_two_programs_do_not_write_into_one_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, run, clock = tmp_path / "source", tmp_path / "run", time.perf_counter
    save_one(source, 1)
    with children((hold, run)) as (other,):
        assert other.hear("is saving")
        (theirs,) = run.glob(".saving-*-step-7")
        with monkeypatch.context() as patched:
            patched.setattr(time, "perf_counter", lambda: 30 * clock())  # waits for a lock seem shorter
            for write in (lambda: save_one(run, 1), lambda: export_safetensors(source, run)):
                with pytest.raises(CheckpointError, match=rf"only program .* process {other.process.pid} on"):
                    write()
        assert theirs.is_dir(), "what another program was writing has gone"
    save_one(run, 1)  # it was killed, and did not get to clean up
    assert [path.name for path in run.iterdir()] == ["000001-step-1"]
