"""End a run early: a loss that is NaN, a rank that hangs, a scheduler's signal."""

import contextlib
import faulthandler
import math
import os
import signal
import sys
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any

import psutil
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from fsdp_utils.distributed.identity import get_rank, get_world_size
from fsdp_utils.train.ranks import ranks

_EXIT_HANG = 70  # EX_SOFTWARE of sysexits.h
_ANSWER_S = 3.0  # for all ranks that still run to have written their stacks


class NotFinite(FloatingPointError):
    """The gradient or the loss is NaN or infinite. Raised on every rank; no checkpoint holds such a step."""


def check_finite(loss: float, norm: float, own: float, step: int, samples: list[int]) -> None:
    """Raise NotFinite on all ranks where the batch's loss or norm is; `own` and `samples` are this rank's."""
    if math.isfinite(loss) and math.isfinite(norm):
        return
    found = ranks().all(lambda: (own, samples))
    culprits = [
        f"the loss of rank {rank} is {own} (samples {', '.join(map(str, samples))})"
        for rank, (own, samples) in enumerate(found)
        if not math.isfinite(own)
    ]
    raise NotFinite(
        f"step {step}: the loss is {loss}, the gradient's norm {norm}; "
        + ("; ".join(culprits) or "the losses of all ranks are finite, so it became so in backward")
        + ". The step is not saved; the checkpoints are from before."
    )


class Watchdog:
    """Ends this rank, with the stacks of its threads, when its training has not moved for a time.

    Ranks wait for each other in every step, so where one hangs, each notices. They write their stacks to
    `directory`, which they share, name the ranks that did not, and send SIGABRT to those on this host.
    """

    def __init__(self, directory: Path, limit_s: float) -> None:
        self._directory, self._limit_s = directory, limit_s
        self._where, self._when = "start", time.monotonic()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def at(self, where: str, limit_s: float | None = None) -> None:
        """Report progress: the time limit starts again, and can be changed."""
        self._limit_s = limit_s or self._limit_s
        self._where, self._when = where, time.monotonic()

    def __enter__(self) -> "Watchdog":
        faulthandler.enable()  # SIGABRT then prints the stacks of all threads
        self.at(self._where)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _written(self, rank: int) -> float:
        file = self._directory / f"stack-of-rank-{rank}.txt"
        return file.stat().st_mtime if file.exists() else 0.0

    def _watch(self) -> None:
        while True:
            # where C code holds the GIL, this thread cannot run; this timer needs no GIL
            faulthandler.dump_traceback_later(2 * self._limit_s + 2 * _ANSWER_S, exit=True)
            if self._over.wait(min(1.0, self._limit_s / 10)):
                faulthandler.cancel_dump_traceback_later()
                return
            quiet_s = time.monotonic() - self._when
            if quiet_s > self._limit_s:
                self._end(f"at {self._where}, no move for {quiet_s:.0f} s")

    def _end(self, what: str) -> None:
        with contextlib.suppress(OSError):  # such as a full disk
            self._directory.mkdir(parents=True, exist_ok=True)
            with (self._directory / f"stack-of-rank-{get_rank()}.txt").open("w") as file:
                faulthandler.dump_traceback(file, all_threads=True)
        time.sleep(_ANSWER_S)
        since = self._written(get_rank()) - self._limit_s  # older stacks are of a start before this one
        silent = [str(rank) for rank in range(get_world_size()) if self._written(rank) < since]
        found = f"no stacks from rank {', '.join(silent)}" if silent else "all ranks have written"
        error = f"Hang: {what}; {found}. Compare the stacks in {self._directory}"
        with contextlib.suppress(OSError):
            get_error_handler().record_exception(RuntimeError(error))
        print(f"[rank {get_rank()}] {error}", file=sys.stderr, flush=True)
        for process in psutil.Process(os.getppid()).children():  # the ranks of one torchrun
            with contextlib.suppress(psutil.Error):
                if process.environ().get("RANK") in silent:
                    process.send_signal(signal.SIGABRT)
                    process.send_signal(signal.SIGCONT)
        os._exit(_EXIT_HANG)


class StopSignal:
    """Records a scheduler's request to stop: SIGTERM (torchrun, scancel) or SIGUSR1 (sbatch --signal)."""

    def __init__(self) -> None:
        self.asked = False  # this rank
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "StopSignal":
        if threading.current_thread() is threading.main_thread():  # no other can have handlers
            for number in (signal.SIGTERM, signal.SIGUSR1):
                self._before[number] = signal.signal(number, self._record)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _record(self, number: int, frame: FrameType | None) -> None:
        self.asked = True
