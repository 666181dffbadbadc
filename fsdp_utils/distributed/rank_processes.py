"""Start processes for ranks, forked from a server that has torch imported; end them with all they started.

`run_on_ranks` and the ranks of a notebook are such processes. This module imports no torch, so that a caller
which only starts ranks need not.
"""

import gc
import multiprocessing
import os
import pkgutil
import signal
import sys
import threading
import types
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from multiprocessing.forkserver import ensure_running, set_forkserver_preload
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import Any, NamedTuple

from fsdp_utils.distributed.rank_supervisor import supervise_rank

EXIT_S = 5.0  # for a rank to be gone once it is told to end

# What most often is behind the signal that ended a rank.
_OFTEN = {
    "SIGKILL": " (often: out of memory)",
    "SIGABRT": " (often: C++ code ended it, such as NCCL's watchdog after a time-out or an error of the GPU)",
}


class RankProcess(NamedTuple):
    """The process of a rank, as its caller sees it."""

    rank: int
    process: BaseProcess  # the rank's supervisor
    pipe: Connection  # to the rank
    control: Connection  # to the supervisor: what is sent through it ends the rank, as does closing it

    def exit_code(self, limit_s: float = 1.0) -> int | None:
        """The exit code, or minus the signal that ended the rank; None while it runs or if nobody knows."""
        with suppress(EOFError, OSError):  # the supervisor has been killed, too
            if self.control.poll(limit_s):
                return self.control.recv()
        return None

    def end(self) -> None:
        """Tell the supervisor to end the rank and all that it started."""
        with suppress(OSError):  # both are gone
            self.control.send("end")

    def close(self) -> None:
        """Wait until nothing is left of a rank that has ended or was told to, and free its connections."""
        self.process.join(EXIT_S)
        self.process.kill()  # a supervisor that does not answer; the rank ends with it
        self.process.join(EXIT_S)
        if self.process.exitcode is not None:
            self.process.close()
        self.pipe.close()
        self.control.close()


def how_it_ended(code: int) -> str:
    """Describe an exit code, as `RankProcess.exit_code` gives it."""
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:  # a real-time signal has no name
        name = f"signal {-code}"
    return f"was killed by {name}{_OFTEN.get(name, '')}"


def start_server(modules: Sequence[str]) -> str:
    """Start the server that ranks are forked from, unless it runs; it imports these modules first.

    Returns:
        The start method for the ranks.
    """
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
    """Start a rank, with this process's environment.

    Args:
        method: from `start_server`.
        main: "module:function", called on the rank as `function(rank, pipe, directory, *args)`.
        rank: its number.
        directory: temporary files of the ranks, removed when this process dies.
        args: what else the function gets.
        output: this process's descriptors for the rank's standard output and standard error.
    """
    context: Any = multiprocessing.get_context(method)
    (ours, theirs), (control, held) = context.Pipe(), context.Pipe()
    caller = os.environ.copy(), multiprocessing.get_start_method(allow_none=True), _Output(output)
    with _main_hidden(), theirs, held:  # only the rank's ends stay open, so that its death closes the pipe
        process = context.Process(
            target=_be_rank, args=(main, rank, theirs, held, directory, caller, args), name=f"rank {rank}"
        )
        process.start()
    return RankProcess(rank, process, ours, control)


class _Output:
    """Descriptors of the caller for a rank's standard output and standard error, sent with the rank.

    A forked rank would write to where the server's output went when the server was started; the caller may
    have redirected its own since (pytest's capfd does).
    """

    def __init__(self, descriptors: Sequence[Any]) -> None:
        self._descriptors = descriptors

    def __reduce__(self) -> tuple[Any, ...]:
        return _Output, ([DupFd(descriptor) for descriptor in self._descriptors],)

    def take(self) -> None:
        for number, received in enumerate(self._descriptors, start=1):
            if (descriptor := received.detach()) != number:  # a spawned rank may have it by itself
                os.dup2(descriptor, number)
                os.close(descriptor)


def _be_rank(
    main: str,
    rank: int,
    pipe: Connection,
    control: Connection,
    directory: Path,
    caller: tuple[Mapping[str, str], str | None, _Output],
    args: Sequence[Any],
) -> None:
    supervise_rank(control, pipe, directory)
    environ, start_method, output = caller
    output.take()
    if not directory.exists():  # the call was interrupted while this rank was being started
        return
    gc.freeze()  # what the server has imported is no garbage
    gc.enable()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    multiprocessing.set_start_method(start_method, force=True)  # as in the caller, for DataLoader workers
    os.environ.clear()
    os.environ.update(environ)
    pkgutil.resolve_name(main)(rank, pipe, directory, *args)


_main_lock = threading.Lock()


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
