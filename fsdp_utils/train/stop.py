"""A scheduler's signal: the run stops after its step, and a rank that cannot hear of it ends all the same."""

import contextlib
import faulthandler
import os
import select
import signal
import socket
import sys
import threading
import time
from types import FrameType, TracebackType
from typing import Any

from fsdp_utils.distributed.identity import get_rank
from fsdp_utils.train.watchdog import EXIT_HANG, Heartbeat

__all__ = ["Stop"]

_STUCK_S = 20.0  # torchrun kills 30 s after SIGTERM, unless it is told otherwise
_POLL_S = 0.25


class Stop:
    """Has the scheduler asked this rank to stop? SIGTERM (torchrun, scancel) and SIGUSR1 (sbatch --signal).

    The handler only notes it: the ranks agree on the step at which they stop, as not all get the signal at
    the same time, and with `sbatch --signal=B:...` not all get it.

    Python runs handlers on the main thread, between two of its instructions: never while that thread waits
    in C, such as for an NCCL kernel whose peer is gone. So a thread of its own hears of the signal too, and
    ends a rank that does not move for 20 s; torchrun would wait longer, and then kill it without a word.

    Args:
        heart: knows where training is.
    """

    def __init__(self, heart: Heartbeat) -> None:
        self.wanted: str | None = None  # the signal's name
        self._heart = heart
        self._before: dict[int, Any] = {}
        self._over = threading.Event()

    def __enter__(self) -> "Stop":
        if threading.current_thread() is threading.main_thread():  # no other can have handlers
            self._heard, self._told = socket.socketpair()
            self._told.setblocking(False)
            # Python's signal handling in C writes the signal's number there, whatever any thread is at.
            self._fd_before = signal.set_wakeup_fd(self._told.fileno(), warn_on_full_buffer=False)
            for number in (signal.SIGTERM, signal.SIGUSR1):
                self._before[number] = signal.signal(number, self._note)
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
            self._told.close()  # ends the thread's wait

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.wanted = signal.Signals(number).name

    def _watch(self) -> None:
        with self._heard:
            name, asked = self._hear(), time.monotonic()
            while name is not None and not self._over.wait(_POLL_S):
                stuck_s = self._heart.stuck_s(asked, _STUCK_S)
                if stuck_s is not None:
                    _end(name, self._heart.where, stuck_s)

    def _hear(self) -> str | None:
        """Wait for one of the signals: its name; None when it is over."""
        while not self._over.is_set():
            select.select([self._heard], [], [])
            numbers = self._heard.recv(64)
            asking = [number for number in numbers if number in self._before]
            if asking or not numbers:
                return signal.Signals(asking[0]).name if asking else None
        return None


def _end(name: str, where: str, stuck_s: float) -> None:
    text = (
        f"[rank {get_rank()}] asked to stop by {name}, it has not moved for {stuck_s:.0f} s, at {where}: it "
        "ends without saving. The run goes on from its newest checkpoint. Its stacks:"
    )
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)
        faulthandler.dump_traceback(all_threads=True)
    os._exit(EXIT_HANG)
