"""Start processes for ranks, forked from a server that has torch imported; end them with all they started.

`run_on_ranks` and the ranks of a notebook are such processes. This module imports no torch, so that a caller
which only starts ranks need not.

The parent of each rank is a supervisor. It runs none of the rank's code, so it answers also when the rank has
died or holds the interpreter, and Linux makes it the parent of the processes that the rank leaves.
"""

import ctypes
import gc
import multiprocessing
import os
import pkgutil
import shutil
import signal
import sys
import threading
import time
import types
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.forkserver import ensure_running, set_forkserver_preload
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

import psutil

EXIT_S = 5.0  # for a rank to be gone once it is told to end
_END_S = 4.0  # for killed processes to be gone; the caller waits a little longer for the supervisor
_POLL_S = 0.01
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # <linux/prctl.h>

_OFTEN = {  # the usual reasons for a signal
    "SIGKILL": " (often: out of memory)",
    "SIGABRT": " (often: C++ code ended it, such as NCCL's watchdog after a time-out or an error of the GPU)",
}
_main_lock = threading.Lock()


class Ended(NamedTuple):
    """The last message of a rank: its process has ended."""

    code: int | None  # the exit code, or minus the signal; None: it has closed its connection

    def __str__(self) -> str:
        if self.code is None:
            return "closed its connection to the caller (does it close descriptors that it did not open?)"
        if self.code >= 0:
            return f"ended with exit code {self.code}"
        names = {int(one): one.name for one in signal.Signals}  # a real-time signal has no name
        name = names.get(-self.code, f"signal {-self.code}")
        return f"was killed by {name}{_OFTEN.get(name, '')}"


class RankProcess(NamedTuple):
    """The process of a rank, as its caller sees it."""

    rank: int
    process: BaseProcess  # the rank's supervisor
    pipe: Connection  # to the rank
    control: Connection  # to the supervisor: what is sent through it ends the rank, as does closing it

    def send(self, message: Any) -> None:
        """Send a message; that a rank has ended is noticed where its answer is awaited."""
        with suppress(OSError):
            self.pipe.send(message)

    def end(self) -> None:
        """Tell the supervisor to end the rank and all that it started."""
        with suppress(OSError):  # both are gone
            self.control.send("end")

    def close(self) -> None:
        """Wait until nothing is left of a rank that has ended or was told to, and free its connections."""
        self.process.join(EXIT_S)
        self.process.kill()  # a supervisor that does not answer; the rank ends with it
        self.process.join(EXIT_S)
        self.pipe.close()
        self.control.close()

    def next_message(self) -> Any:
        """Take the message that has arrived; the last one is an `Ended`."""
        with suppress(Exception):  # the rank has ended, or has written nonsense to its pipe
            if self.pipe.poll():
                return self.pipe.recv()
        code = None
        with suppress(EOFError, OSError):  # the supervisor has been killed, too
            code = self.control.recv() if self.control.poll(1.0) else None
        return Ended(code)


def receive(ranks: Iterable[RankProcess], limit_s: float) -> list[tuple[RankProcess, Any]]:
    """Take the next message of each rank that has one within the limit."""
    owners: dict[Any, RankProcess] = {end: rank for rank in ranks for end in (rank.pipe, rank.control)}
    ready = {owners[connection] for connection in wait(list(owners), limit_s)}
    return [(rank, rank.next_message()) for rank in sorted(ready, key=lambda rank: rank.rank)]


def start_server(modules: Sequence[str]) -> str:
    """Start the server that ranks are forked from, unless it runs; returns the start method for the ranks."""
    with _main_hidden():
        set_forkserver_preload(["fsdp_utils.distributed.preload", *modules])
        try:
            ensure_running()
        except ChildProcessError:  # this process is itself a fork; the server it knows is its parent's child
            return "spawn"
    return "forkserver"


def start_rank(
    method: str, main: str, rank: int, directory: Path, *args: Any, output: Sequence[int] = (1, 2)
) -> RankProcess:
    """Start a rank, with this process's environment, which calls `main(rank, pipe, directory, *args)`.

    `main` is "module:function", `method` is from `start_server`, and the directory is removed when this
    process dies. `output` has the descriptors for standard output and standard error, as the server's may be
    others by now.
    """
    context: Any = multiprocessing.get_context(method)
    written = [Connection(os.dup(descriptor), readable=False) for descriptor in output]
    (ours, theirs), (control, held) = context.Pipe(), context.Pipe()
    caller = os.environ.copy(), written
    with _main_hidden(), theirs, held:  # only the rank's ends stay open, so that its death closes the pipe
        process = context.Process(
            target=_be_rank, args=(main, held, caller, rank, theirs, directory, *args), name=f"rank {rank}"
        )
        process.start()
    for connection in written:
        connection.close()
    return RankProcess(rank, process, ours, control)


def _be_rank(
    main: str, control: Connection, caller: Any, rank: int, pipe: Connection, directory: Path, *args: Any
) -> None:
    """Run `main` in a child of this process, which stays as its supervisor."""
    os.setpgid(0, 0)  # Ctrl-C in the terminal reaches the caller alone
    supervisor = os.getpid()
    prctl = ctypes.CDLL(None).prctl if sys.platform == "linux" else lambda *_: None
    prctl(_PR_SET_CHILD_SUBREAPER, 1)
    if child := os.fork():
        pipe.close()
        _watch(child, control, directory)
        os._exit(0)
    prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != supervisor:  # it died before this process could ask for the signal
        os._exit(1)
    control.close()
    environ, output = caller
    for number, connection in enumerate(output, start=1):
        os.dup2(connection.fileno(), number)
        connection.close()
    if not directory.exists():  # the call was interrupted while this rank was being started
        return
    gc.freeze()  # never collect what the server has imported
    gc.enable()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(environ)
    pkgutil.resolve_name(main)(rank, pipe, directory, *args)


def _watch(rank: int, control: Connection, directory: Path) -> None:
    """Wait until the rank ends, or the caller ends it or dies; send the exit code, and end what is left."""
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


@contextmanager
def _main_hidden() -> Iterator[None]:
    """Keep multiprocessing from importing the caller's __main__ (a script, pytest, a notebook) in the ranks.

    What a function needs from __main__ travels with it; running the file again would start ranks in ranks.
    """
    with _main_lock:
        main = sys.modules["__main__"]
        sys.modules["__main__"] = types.ModuleType("__main__")
        try:
            yield
        finally:
            sys.modules["__main__"] = main
