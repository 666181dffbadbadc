"""A run's directory: locked; its checkpoints saved in the background, and the newest whole one resumed."""

import contextlib
import fcntl
import sys
import time
from pathlib import Path
from typing import IO, Any

from torch import nn
from torch.optim import Optimizer

from fsdp_utils.checkpoint import (
    CheckpointDamagedError,
    CheckpointError,
    Save,
    checkpoints,
    load_distributed,
    save_distributed,
)
from fsdp_utils.distributed.identity import get_rank
from fsdp_utils.train.config import ConfigError
from fsdp_utils.train.metrics import RunLog
from fsdp_utils.train.ranks import ranks

__all__ = ["Checkpoints", "lock_directory", "resume"]

_LOCK_WAIT_S = 5.0  # for the ranks of the start before to have ended, on another host perhaps


def lock_directory(out: Path) -> contextlib.AbstractContextManager[Any]:
    """Make a run's directory and allow one run at a time in it: rank 0 locks it until the context ends.

    Raises:
        ConfigError: another run is going on in the directory, or it cannot be written to.
    """
    if get_rank() != 0:
        return contextlib.nullcontext()
    try:
        out.mkdir(parents=True, exist_ok=True)
        file = (out / ".lock").open("w")
    except OSError as error:
        raise ConfigError(f"out: expected a directory to write to, found {out}: {error}") from error
    if not _locked(file):
        raise ConfigError(
            f"out: expected a directory in which no other run is going on, found one in {out}. End that run "
            "first, or choose another --out."
        )
    return file


def _locked(file: IO[str]) -> bool:
    """A lock of this process, which no fork of it keeps when it dies."""
    limit = time.monotonic() + _LOCK_WAIT_S
    while time.monotonic() < limit:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except (BlockingIOError, PermissionError):  # noqa: PERF203
            time.sleep(0.05)
        except OSError as error:
            print(
                f"{file.name}: {error}; a second run in this directory would not be noticed", file=sys.stderr
            )
            return True
    return False


def resume(directory: Path, model: nn.Module, optimizer: Optimizer) -> tuple[dict[str, Any], list[str]]:
    """Load the newest checkpoint that is not damaged, on any number of ranks. Every rank calls it.

    Returns:
        The state that was saved, {} where there is none to load; and the errors of the damaged ones.

    Raises:
        CheckpointError: the newest is whole, but not of this model or this optimizer.
    """
    damaged = []
    for step in reversed(ranks().first(lambda: list(checkpoints(directory)))):
        try:
            return load_distributed(directory, model, optimizer, step=step), damaged
        except CheckpointDamagedError as error:  # noqa: PERF203
            damaged.append(str(error))
    return {}, damaged


class Checkpoints:
    """Saves a run's state in the background, one save at a time.

    Args:
        directory: where the checkpoints are.
        keep: how many are kept.
        saved: the step of the newest; None where there is none.
        identity: of the data, which each checkpoint holds.
        log: where saves are logged.
    """

    def __init__(self, directory: Path, keep: int, saved: int | None, identity: str, log: RunLog) -> None:
        self._directory, self._keep, self._saved = directory, keep, saved
        self._identity, self._log = identity, log
        self._in_flight: tuple[int, Save] | None = None

    def begin(self, model: nn.Module, optimizer: Optimizer, step: int, seen: int) -> None:
        """Save in the background. A failure, also of the save before, is logged and ends nothing."""
        self._wait()
        try:
            self._in_flight = step, self._save(model, optimizer, step, seen, asynchronous=True)
        except CheckpointError as error:
            self._failed(step, error)

    def finish(self, model: nn.Module, optimizer: Optimizer, step: int, seen: int) -> None:
        """Save before the run ends, unless this step is saved already.

        Raises:
            CheckpointError: the step is not saved, so the run must not end as if it were.
        """
        self._wait()
        if self._saved != step:
            self._save(model, optimizer, step, seen, asynchronous=False)
            self._log.event("saved", step=step)

    def _save(self, model: nn.Module, optimizer: Optimizer, step: int, seen: int, asynchronous: bool) -> Save:
        self._log.durable()
        return save_distributed(
            self._directory,
            model,
            optimizer,
            step=step,
            state={"seen": seen, "data": self._identity},
            keep=self._keep,
            asynchronous=asynchronous,
        )

    def _wait(self) -> None:
        if self._in_flight is None:
            return
        (step, save), self._in_flight = self._in_flight, None
        try:
            save.wait()
        except CheckpointError as error:
            self._failed(step, error)
        else:
            self._saved = step
            self._log.event("saved", step=step)

    def _failed(self, step: int, error: CheckpointError) -> None:
        self._log.event("failed to save", step=step, error=str(error))
        self._log.say(f"step {step} is not saved: {error}")
