"""Ranks are killed at random moments of a save: what was committed before is there, whole, and loads."""

import multiprocessing
import os
import random
import signal
import tempfile
import time
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from fsdp_utils import CheckpointError, load_distributed, save_distributed, verify_checkpoint
from fsdp_utils.checkpoint.manifest import committed
from fsdp_utils.distributed.launch import _PRELOAD

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
