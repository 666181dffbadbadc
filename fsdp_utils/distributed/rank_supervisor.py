"""The supervisor of a rank: ends it and all that it started when the caller asks for it, or is gone.

The supervisor is a separate process, the rank's parent. A rank can die, or hold the interpreter in C code, and
a process that it started may have left its process group (`start_new_session=True`). The supervisor runs none
of the rank's code, so it always answers, and Linux makes it the parent of the processes that the rank leaves.
"""

import ctypes
import os
import shutil
import signal
import sys
import time
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path

import psutil

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # <linux/prctl.h>
_POLL_S = 0.01
_END_S = 4.0  # for killed processes to be gone; the caller waits a little longer for the supervisor


def supervise_rank(control: Connection, pipe: Connection, directory: Path) -> None:
    """Return as the rank, and leave a supervisor behind.

    Args:
        control: the caller sends something through it to end the rank, and gets the rank's exit code. It
            closes when the caller dies; the supervisor then also removes what the caller would have removed.
        pipe: the rank's connection to the caller, of which the supervisor holds no end.
        directory: the call's temporary directory.
    """
    os.setpgid(0, 0)  # Ctrl-C in the terminal reaches the caller alone
    supervisor = os.getpid()
    prctl = ctypes.CDLL(None).prctl if sys.platform == "linux" else lambda *_: None
    prctl(_PR_SET_CHILD_SUBREAPER, 1)
    if rank := os.fork():
        pipe.close()
        _watch(rank, control, directory)
        os._exit(0)
    prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != supervisor:  # it died before this process could ask for the signal
        os._exit(1)
    control.close()


def _watch(rank: int, control: Connection, directory: Path) -> None:
    """Wait until the rank ends or the caller ends it; tell the exit code, and end what is left."""
    ended, status = 0, 0
    while not ended and not control.poll(_POLL_S):
        ended, status = os.waitpid(rank, os.WNOHANG)
    try:
        if not ended:
            control.recv()
        control.send(os.waitstatus_to_exitcode(status) if ended else -int(signal.SIGKILL))
    except (EOFError, OSError):  # the caller is gone
        shutil.rmtree(directory, ignore_errors=True)
    limit = time.monotonic() + _END_S
    with suppress(ChildProcessError):  # none is left
        while time.monotonic() < limit:
            for child in psutil.Process().children(recursive=True):
                with suppress(psutil.Error):
                    child.kill()
            time.sleep(0.002)
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
