"""A run's directory: locked; its checkpoints saved in the background, and the newest whole one resumed."""

import time
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from fsdp_utils.checkpoint import (
    CheckpointError,
    Save,
    checkpoints,
    load_distributed,
    save_distributed,
    verify_checkpoint,
)
from fsdp_utils.checkpoint.files import Lock, LockTaken
from fsdp_utils.train.config import ConfigError
from fsdp_utils.train.group import on_rank_0
from fsdp_utils.train.metrics import RunLog

__all__ = ["Checkpoints", "lock_directory", "resume"]

_LOCK_WAIT_S = 5.0  # for the ranks of the start before to have ended, on another host perhaps


def lock_directory(out: Path) -> Lock:
    """Allow one run at a time in a directory: rank 0 locks the file `.lock` in it until the run ends.

    Args:
        out: the run's directory; it is made if it is not there.

    Raises:
        ConfigError: another run is going on in the directory, or it cannot be written to.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        return Lock(out / ".lock", wait_s=_LOCK_WAIT_S)
    except LockTaken as owner:
        raise ConfigError(
            f"out: expected a directory in which no other run is going on, found {out} is in use by {owner}. "
            "End that run first, or choose another --out."
        ) from None
    except OSError as error:
        raise ConfigError(
            f"out: expected a directory to write to, found {str(out)!r} is none: {error}"
        ) from error


def resume(directory: Path, model: nn.Module, optimizer: Optimizer) -> tuple[dict[str, Any], list[str]]:
    """Load the newest checkpoint that is whole, on any number of ranks. Every rank calls it.

    A damaged one is renamed and left for inspection, so that no later start tries it again.

    Returns:
        The state that was saved, {} where there is no checkpoint; and the errors of the damaged ones.

    Raises:
        CheckpointError: the newest is whole, but not of this model or this optimizer.
    """
    damaged: list[str] = []
    while on_rank_0(lambda: bool(checkpoints(directory))):
        state, damage = _load_newest(directory, model, optimizer)
        if damage is None:
            return state, damaged
        damaged.append(damage)
    return {}, damaged


def _load_newest(
    directory: Path, model: nn.Module, optimizer: Optimizer
) -> tuple[dict[str, Any], str | None]:
    try:
        return load_distributed(directory, model, optimizer), None
    except CheckpointError:
        damage = on_rank_0(lambda: _set_aside_if_damaged(directory))
        if damage is None:
            raise
        return {}, damage


def _set_aside_if_damaged(directory: Path) -> str | None:
    newest = list(checkpoints(directory).values())[-1]
    try:
        verify_checkpoint(newest)
    except CheckpointError as error:
        # The step may be saved again under the same name, and damaged again: one name for each time.
        newest.rename(newest.with_name(f"damaged-{newest.name}-{time.time_ns()}"))
        return str(error)
    return None


class Checkpoints:
    """Saves in the background; a failed save is logged, and the next one is tried all the same.

    Args:
        directory: where they are.
        keep: how many are kept.
        saved: the step of the newest that is there; None where there is none.
        log: where failures are written.
        about: what each checkpoint holds about the run.
    """

    def __init__(
        self, directory: Path, keep: int, saved: int | None, log: RunLog, about: dict[str, Any]
    ) -> None:
        self._directory, self._keep, self._log, self._about = directory, keep, log, about
        self._saved = saved
        self._in_flight: tuple[Save, int] | None = None

    def begin(self, model: nn.Module, optimizer: Optimizer, step: int, **state: Any) -> None:
        """Save in the background. A failure, of this save or of the one before, does not end the run."""
        self._wait()
        try:
            save = save_distributed(
                self._directory,
                model,
                optimizer,
                step=step,
                keep=self._keep,
                asynchronous=True,
                state={**self._about, **state},
            )
            self._in_flight = (save, step)
        except CheckpointError as error:
            self._log.event("failed to save", step=step, error=str(error))

    def finish(self, model: nn.Module, optimizer: Optimizer, step: int, **state: Any) -> None:
        """Save before the run ends, if this step is not saved yet.

        Raises:
            CheckpointError: it is not saved, and so the run must not end as if it were.
        """
        self._wait()
        if self._saved != step:
            everything = {**self._about, **state}
            save_distributed(self._directory, model, optimizer, step=step, keep=self._keep, state=everything)
            self._saved = step
            self._log.event("saved", step=step)

    def _wait(self) -> None:
        if self._in_flight is None:
            return
        (save, step), self._in_flight = self._in_flight, None
        try:
            save.wait()
        except CheckpointError as error:
            self._log.event("failed to save", step=step, error=str(error))
        else:
            self._saved = step
            self._log.event("saved", step=step)
