"""The supervisor of a rank: ends it and all that it started when the caller asks for it, or is gone.

On Linux the supervisor is a process of its own, the rank's parent. A rank can die, or hold the interpreter in
C code, and a process that it started may have left its process group (`start_new_session=True`). The
supervisor runs none of the rank's code, so it always answers, and the kernel makes it the parent of the
processes that the rank leaves. Elsewhere it is a thread of the rank, and reaches only its process group.
"""

import ctypes
import os
import shutil
import signal
import sys
import threading
import time
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import NoReturn

import psutil

if sys.platform == "linux":
    import resource

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # <linux/prctl.h>
_END_S = 4.0  # for killed processes to be gone; the caller waits a little longer for the supervisor


def supervise_rank(control: Connection, pipe: Connection, directory: Path) -> None:
    """Return as the rank, and leave a supervisor behind.

    Args:
        control: the caller sends something through it to end the rank. It closes when the caller dies; the
            supervisor then also removes what the caller would have removed.
        pipe: the rank's connection to the caller, of which the supervisor holds no end.
        directory: the call's temporary directory.
    """
    if hasattr(os, "setpgid"):
        os.setpgid(0, 0)  # Ctrl-C in the terminal reaches the caller alone
    if sys.platform == "linux":
        _fork(control, pipe, directory)
    else:
        threading.Thread(target=_end_this, args=(control, directory), daemon=True, name="supervisor").start()


def _end_this(control: Connection, directory: Path) -> NoReturn:
    _await_end(control, directory)
    if hasattr(os, "killpg"):
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


def _await_end(control: Connection, directory: Path) -> None:
    try:
        control.recv()
    except (EOFError, OSError):
        shutil.rmtree(directory, ignore_errors=True)


def _fork(control: Connection, pipe: Connection, directory: Path) -> None:
    supervisor = os.getpid()
    prctl = ctypes.CDLL(None).prctl
    prctl(_PR_SET_CHILD_SUBREAPER, 1)
    if rank := os.fork():
        pipe.close()
        _exit_as(_watch(rank, control, directory))
    prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != supervisor:  # it died before this process could ask for the signal
        os._exit(1)
    control.close()


def _watch(rank: int, control: Connection, directory: Path) -> int:
    """Wait until the rank ends or the caller ends it, then end what is left; returns its wait status."""
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake)  # a byte for each SIGCHLD; one that came earlier is found by the first _reap
    statuses: dict[int, int] = {}
    while _reap(statuses) and rank not in statuses:
        if control in wait([control, woken]):
            _await_end(control, directory)
            break
        os.read(woken, 4096)
    limit = time.monotonic() + _END_S
    while _reap(statuses) and time.monotonic() < limit:
        for child in psutil.Process().children():  # the children of a killed child are the supervisor's next
            with suppress(psutil.Error):
                child.kill()
        time.sleep(0.002)
    return statuses.get(rank, signal.SIGKILL)


def _reap(statuses: dict[int, int]) -> bool:
    """Note how children ended; whether there are more."""
    try:
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            statuses[ended[0]] = ended[1]
    except ChildProcessError:
        return False
    return True


def _exit_as(status: int) -> NoReturn:
    """End as the rank did, since the caller sees the end of this process."""
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the rank has left its own core dump
        with suppress(OSError):  # SIGKILL has no handler to take away
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)
