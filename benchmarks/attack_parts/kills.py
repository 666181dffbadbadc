"""Programs that are killed in the middle of a save. What was saved before is there, whole."""

import multiprocessing
import os
import random
import shutil
import signal
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.attack_parts.harness import START_S, Attack, Verdict, judge
from fsdp_utils import load_distributed, save_distributed, verify_checkpoint
from fsdp_utils.checkpoint import CheckpointError


def _model() -> tuple[nn.Module, torch.optim.Optimizer]:
    """6 MiB with its optimizer's state."""
    model = nn.Linear(512, 1024)
    return model, torch.optim.AdamW(model.parameters(), foreach=False)


def _fill(model: nn.Module, optimizer: torch.optim.Optimizer, value: int) -> None:
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(value)
            moments = {name: torch.full_like(param, value) for name in ("exp_avg", "exp_avg_sq")}
            optimizer.state[param] = {"step": torch.tensor(float(value)), **moments}


def _save(folder: Path, asynchronous: bool, first: int, pipe: Connection) -> None:
    """Step after step, until it is killed."""
    torch.set_num_threads(1)
    model, optimizer = _model()
    for step in range(first, first + 10_000):
        _fill(model, optimizer, step)
        pipe.send(("begins", step))
        save_distributed(
            folder, model, optimizer, step=step, keep=2, asynchronous=asynchronous, state={"at": step}
        ).wait()
        pipe.send(("saved", step))


def prepare(folder: Path, quick: bool) -> None:
    (folder / "home").mkdir()


def killed(folder: Path, chance: random.Random) -> Verdict:
    home, note = folder / "home", folder / "step"
    last = int(note.read_text()) if note.exists() else 0
    fork = multiprocessing.get_context("fork")  # this process has a single thread, and all that is needed
    ours, theirs = fork.Pipe(duplex=False)
    saver = fork.Process(target=_save, args=(home, chance.random() < 0.3, last + 1, theirs))
    saver.start()
    theirs.close()
    heard: list[tuple[str, int]] = []

    def hear(limit_s: float) -> bool:
        try:
            return bool(ours.poll(limit_s)) and (heard.append(ours.recv()) or True)
        except EOFError:
            return False

    try:
        start = time.monotonic()
        while [word for word, _ in heard].count("begins") < 2:
            start = time.monotonic()
            if not hear(START_S):
                return Verdict("raw error", f"the saver has not begun: {heard}")
        time.sleep(
            chance.uniform(0.0, 1.1) * (time.monotonic() - start + 0.02)
        )  # anywhere in the second save
        assert saver.pid is not None
        os.kill(saver.pid, signal.SIGKILL)
        while hear(0.2):
            pass
    finally:
        saver.kill()
        saver.join(10)
    told = max((step for word, step in heard if word == "saved"), default=last)

    def call() -> tuple[Any, nn.Module, torch.optim.Optimizer]:
        model, optimizer = _model()
        verify_checkpoint(home)
        return load_distributed(home, model, optimizer), model, optimizer

    def right(found: tuple[Any, nn.Module, torch.optim.Optimizer]) -> str:
        state, model, optimizer = found
        if not told <= state["at"] <= told + 1:
            return f"step {told} was saved, found {state['at']}"
        note.write_text(str(state["at"]))
        tensors = [t for p in model.parameters() for t in (p, *optimizer.state[p].values())]
        return "" if all((t == state["at"]).all() for t in tensors) else "two steps are mixed"

    verdict = judge(call, (CheckpointError,), right)
    if verdict.outcome != "survived":  # there was a whole checkpoint before: to be refused is a loss
        shutil.rmtree(home, ignore_errors=True)
        return Verdict("silently wrong", verdict.text)
    return verdict


KILLS = Attack("kills in saves", prepare, killed, 50, 3)
