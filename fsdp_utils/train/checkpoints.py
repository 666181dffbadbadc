"""Lock a run's directory, save its checkpoints in the background, and resume the newest whole one."""

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

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
from fsdp_utils.checkpoint.files import locked
from fsdp_utils.distributed.identity import get_rank
from fsdp_utils.train.config import ConfigError
from fsdp_utils.train.metrics import RunLog
from fsdp_utils.train.ranks import ranks

T = TypeVar("T")
_LOCK_WAIT_S = 5.0  # for the ranks of the start before to have ended, on another host perhaps


def lock_directory(out: Path) -> contextlib.ExitStack:
    """Make a run's directory, which rank 0 locks for this run until the context ends."""
    stack = contextlib.ExitStack()
    if get_rank() == 0:
        try:
            out.mkdir(parents=True, exist_ok=True)
            stack.enter_context(locked(out / ".lock", wait_s=_LOCK_WAIT_S))
        except (OSError, CheckpointError) as error:
            found = f"found {out}: {error}"
            raise ConfigError(f"out: expected a directory to write to for this run alone, {found}") from error
    return stack


def resume(directory: Path, model: nn.Module, optimizer: Optimizer) -> tuple[dict[str, Any], list[str]]:
    """Load the newest whole checkpoint: its state, {} where there is none, and the errors of damaged ones."""
    damaged = []
    for step in reversed(ranks().first(lambda: list(checkpoints(directory)))):
        try:
            return load_distributed(directory, model, optimizer, step=step), damaged
        except CheckpointDamagedError as error:  # noqa: PERF203
            damaged.append(str(error))
    return {}, damaged


class Checkpoints:
    """Saves a run's state in the background, one save at a time."""

    def __init__(self, directory: Path, keep: int, saved: int | None, identity: str, log: RunLog) -> None:
        self._directory, self._keep, self._saved = directory, keep, saved
        self._identity, self._log = identity, log
        self._in_flight: tuple[int, Save] | None = None

    def save(self, model: nn.Module, optimizer: Optimizer, step: int, seen: int, *, last: bool) -> None:
        """Save in the background, where a failure is logged and ends nothing; the last raises."""
        if self._in_flight is not None:
            (before, save), self._in_flight = self._in_flight, None
            if self._attempt(before, save.wait):
                self._saved = before
                self._log.event("saved", step=before)
        if last and self._saved == step:
            return

        def begin() -> Save:
            state = {"seen": seen, "data": self._identity}
            options: Any = {"step": step, "state": state, "keep": self._keep, "asynchronous": not last}
            return save_distributed(self._directory, model, optimizer, **options)

        if last:
            begin()
            self._log.event("saved", step=step)
        elif save := self._attempt(step, begin):
            self._in_flight = step, save

    def _attempt(self, step: int, fn: Callable[[], T]) -> T | None:
        try:
            return fn()
        except CheckpointError as error:
            self._log.event("failed to save", step=step, error=str(error))
            self._log.say(f"step {step} is not saved: {error}")
            return None
