"""What ends a run early: a loss that is NaN, a rank that hangs, a scheduler's signal.

Each ends the run with a message, within a time limit, and on all ranks.
"""

import contextlib
import faulthandler
import json
import math
import os
import select
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from fsdp_utils.distributed.agreement import library_store, wait_for
from fsdp_utils.distributed.identity import get_rank, get_world_size

__all__ = ["EXIT_HANG", "EXIT_REQUEUE", "Hang", "Heartbeat", "NotFinite", "StopSignal", "check_finite"]

EXIT_REQUEUE = 75  # EX_TEMPFAIL of sysexits.h: come again, and it goes on
EXIT_HANG = 70  # EX_SOFTWARE

_STUCK_S = 20.0  # after a signal; torchrun kills 30 s after SIGTERM, unless it is told otherwise
_STUCK_POLL_S = 0.25
_ANSWER_S = 3.0  # for the ranks that can speak to have written their stacks


class NotFinite(FloatingPointError):
    """The gradient or the loss is NaN or infinite. Raised on every rank; no checkpoint holds such a step."""


def check_finite(what: str, value: float, loss: float, step: int, rows: list[int]) -> None:
    """Stop all ranks where a number that all of them have is none, and say whose loss it came from.

    All ranks have the same value, so that they all come here, or none does.

    Args:
        what: the value's name.
        value: the norm of the whole gradient, or the loss of all ranks together.
        loss: this rank's own part of the loss of this step.
        step: its number.
        rows: the samples that this rank computed.

    Raises:
        NotFinite: names the step, the ranks and their samples.
    """
    if math.isfinite(value):
        return
    losses: list[Any] = [None] * get_world_size()
    dist.all_gather_object(losses, (loss, rows))
    culprits = [
        f"the loss of rank {rank} is {value} (samples {', '.join(map(str, numbers[:8]))}"
        f"{' and more' if len(numbers) > 8 else ''})"
        for rank, (value, numbers) in enumerate(losses)
        if not math.isfinite(value)
    ]
    raise NotFinite(
        f"step {step}: {what} is {value}; "
        + ("; ".join(culprits) or "the losses of all ranks are finite, so it became so in backward")
        + ". The step is not saved; the checkpoints are from before."
    )


class Hang(RuntimeError):
    """Some rank has not moved for longer than the limit."""


class Heartbeat:
    """Ends all ranks when one of them hangs, with the stacks of all ranks that still answer.

    A thread on each rank publishes, in the process group's store, where its training is. When its own
    training makes no progress within the limit, or another rank reports so, the thread writes the stacks of
    all threads to `directory`, waits for the other ranks to do the same, names those that did not, and ends
    the process. A hang thus becomes a failure, after which torchrun can restart the ranks.

    A rank of this host that does not answer, because it was stopped or C code holds its GIL, is ended by
    SIGABRT and leaves its stacks on its stderr; torchrun would kill it after 30 s without them.

    Args:
        directory: where the stacks go; shared by all ranks.
        limit_s: seconds, until `at` is given another limit.
    """

    def __init__(self, directory: Path, limit_s: float) -> None:
        self._directory, self._limit_s = directory, limit_s
        self._rank, self._world_size = get_rank(), get_world_size()
        self._where, self._when = "start", time.monotonic()
        self._is_saving = False
        self.longest_step_s = 0.0  # until now, but for the first of a start
        self._over = threading.Event()
        self._store = library_store("train")
        self._siblings = [socket.gethostname(), os.getppid()]  # what ranks of one torchrun have in common

    def at(self, where: str, limit_s: float | None = None, *, is_saving: bool = False) -> None:
        """Report progress: the time limit starts again, and can be changed.

        Args:
            where: in words.
            limit_s: seconds, for this and what comes after it; None leaves the limit as it is.
            is_saving: what begins here is a save, which takes its time also where the rank is to stop.
        """
        self._limit_s = limit_s or self._limit_s
        self._where, self._when, self._is_saving = where, time.monotonic(), is_saving
        # Should C code hold the GIL, the thread below cannot speak; this one needs no GIL.
        faulthandler.dump_traceback_later(2 * self._limit_s + 2 * _ANSWER_S, exit=True)

    def stuck_s(self, since: float, patience_s: float) -> float | None:
        """Seconds without progress; None if training is saving, or may still be at a long step.

        Args:
            since: the time.monotonic() from which on it counts.
            patience_s: seconds that it may take; or twice its longest step, where that is longer.
        """
        quiet_s = time.monotonic() - max(since, self._when)
        patience_s = max(patience_s, 2 * self.longest_step_s)
        return None if self._is_saving or quiet_s < patience_s else quiet_s

    @property
    def where(self) -> str:
        """The last place that training reported."""
        return self._where

    def __enter__(self) -> "Heartbeat":
        faulthandler.enable()  # so that SIGABRT leaves the stacks of all threads, whatever they are in
        self.at(self._where)
        threading.Thread(target=self._watch, name="heartbeat", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, frames: TracebackType | None
    ) -> None:
        self._over.set()
        faulthandler.cancel_dump_traceback_later()

    def _watch(self) -> None:
        while not self._over.wait(min(1.0, self._limit_s / 10)):
            quiet_s = time.monotonic() - self._when
            try:
                self._store.set(f"beat/{self._rank}", self._beat())
                if quiet_s > self._limit_s:
                    self._store.set("hang", "")
                if self._store.check(["hang"]):
                    self._end_hang(quiet_s)
            except RuntimeError:  # the store is gone: the run is ending, and torchrun sees to it
                return

    def _beat(self) -> str:
        return json.dumps([time.time(), self._where, self._siblings, os.getpid()])

    def _end_hang(self, quiet_s: float) -> None:
        with contextlib.suppress(OSError):  # a full disk must not keep this from its end
            self._directory.mkdir(parents=True, exist_ok=True)
            with (self._directory / f"stack-of-rank-{self._rank}.txt").open("w") as stacks:
                stacks.write(f"rank {self._rank}, {self._where}: has not moved for {quiet_s:.0f} s\n\n")
                stacks.flush()
                faulthandler.dump_traceback(stacks, all_threads=True)
        report, silent = self._report(quiet_s)
        error = Hang(report)
        with contextlib.suppress(OSError):
            get_error_handler().record_exception(error)
        print(f"[rank {self._rank}] Hang: {error}", file=sys.stderr, flush=True)
        for pid in silent:
            _abort(pid)
        os._exit(EXIT_HANG)

    def _report(self, quiet_s: float) -> tuple[str, list[int]]:
        """Wait until the ranks that answer have written their stacks.

        Returns:
            A text about the ranks that do not answer, and the processes of those on this host.
        """
        self._store.set(f"answer/{self._rank}", "")
        everyone = range(self._world_size)
        wait_for(self._store, [f"answer/{rank}" for rank in everyone], _ANSWER_S)
        silent, pids = [], []
        for rank in [rank for rank in everyone if not self._store.check([f"answer/{rank}"])]:
            seen = "it was never heard of"
            if self._store.check([f"beat/{rank}"]):
                when, where, siblings, pid = json.loads(self._store.get(f"beat/{rank}"))
                seen = f"last heard of {time.time() - when:.0f} s ago, {where}"
                if siblings == self._siblings:
                    pids.append(pid)
                    seen += "; ended now, with its stacks on its stderr"
            silent.append(f"rank {rank} does not answer: {seen}")
        text = (
            f"at {self._where}, no move for {quiet_s:.0f} s. "
            + ("; ".join(silent) or "All ranks answer, so none is stopped or gone: compare their stacks")
            + f". Stacks: {self._directory}"
        )
        return text, pids


def _abort(pid: int) -> None:
    """End a process with its stacks, also a stopped one: that gets the first signal with the second."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGABRT)
        os.kill(pid, signal.SIGCONT)


# ---- a scheduler's signal ------------------------------------------------------------------------


class StopSignal:
    """Receives a scheduler's request to stop: SIGTERM (torchrun, scancel), SIGUSR1 (sbatch --signal).

    The handler only records the signal: the ranks agree on the step at which they stop, as not all receive
    it at the same time, and with `sbatch --signal=B:...` not all receive it.

    Python runs handlers on the main thread, between two of its instructions: never while that thread waits
    in C, such as for an NCCL kernel whose peer is gone. So a thread of its own receives the signal too, and
    ends a rank without progress for 20 s; torchrun would wait longer, and then kill it without a message.

    Args:
        heart: the rank's heartbeat.
    """

    def __init__(self, heart: Heartbeat) -> None:
        self.wanted: str | None = None  # the signal's name
        self._heart = heart
        self._before: dict[int, Any] = {}
        self._over = threading.Event()

    def __enter__(self) -> "StopSignal":
        if threading.current_thread() is threading.main_thread():  # no other can have handlers
            self._receiver, self._sender = socket.socketpair()
            self._sender.setblocking(False)
            # Python's signal handling in C writes the signal's number there, whatever any thread is at.
            self._fd_before = signal.set_wakeup_fd(self._sender.fileno(), warn_on_full_buffer=False)
            for number in (signal.SIGTERM, signal.SIGUSR1):
                self._before[number] = signal.signal(number, self._record)
            threading.Thread(target=self._watch, name="stop", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, frames: TracebackType | None
    ) -> None:
        self._over.set()
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if self._before:
            signal.set_wakeup_fd(self._fd_before)
            self._sender.close()  # ends the thread's wait

    def _record(self, number: int, frame: FrameType | None) -> None:
        self.wanted = signal.Signals(number).name

    def _watch(self) -> None:
        with self._receiver:
            name, asked = self._receive(), time.monotonic()
            while name is not None and not self._over.wait(_STUCK_POLL_S):
                stuck_s = self._heart.stuck_s(asked, _STUCK_S)
                if stuck_s is not None:
                    _end_stuck(name, self._heart.where, stuck_s)

    def _receive(self) -> str | None:
        """Wait for one of the signals: its name; None when it is over."""
        while not self._over.is_set():
            select.select([self._receiver], [], [])
            numbers = self._receiver.recv(64)
            asking = [number for number in numbers if number in self._before]
            if asking or not numbers:
                return signal.Signals(asking[0]).name if asking else None
        return None


def _end_stuck(name: str, where: str, stuck_s: float) -> None:
    text = (
        f"[rank {get_rank()}] asked to stop by {name}, it has not moved for {stuck_s:.0f} s, at {where}: it "
        "ends without saving. The run goes on from its newest checkpoint. Its stacks:"
    )
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)
        faulthandler.dump_traceback(all_threads=True)
    os._exit(EXIT_HANG)
