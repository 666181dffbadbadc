"""Run a function on several ranks of this machine and bring back what each returns, or the first failure.

The ranks are processes forked from a server that has torch imported. Their process group, gloo, listens on
the loopback interface only.
"""

import linecache
import multiprocessing
import os
import pickle
import re
import signal
import sys
import tempfile
import threading
import time
import traceback
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.forkserver import ensure_running, set_forkserver_preload
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

import cloudpickle

from fsdp_utils.distributed import rank_process
from fsdp_utils.distributed.rank_errors import read_finding, unpack_error
from fsdp_utils.distributed.rank_process import START_LIMIT_S, CallersOutput, Job, rank_main

_PRELOAD = ["fsdp_utils.distributed.preload"]

_LONGEST_S = 1e6  # eleven days; faulthandler's clock overflows later
_BLAME_S = 0.3  # after the first failure arrived, how long to wait for one that happened earlier
_EXIT_S = 5.0  # for a rank to leave once its result is here


def run_on_ranks(fn: Callable[..., Any], *args: Any, world_size: int = 2, timeout: float = 60.0) -> list[Any]:
    """Run `fn(*args)` on each of `world_size` ranks of this machine and return what each rank returned.

    Inside fn the process group is initialised, and RANK, LOCAL_RANK, WORLD_SIZE and so on are set as
    torchrun sets them (without MASTER_ADDR and MASTER_PORT: there is no port). fn may be defined anywhere:
    in a notebook cell, in a script (no `if __name__ == "__main__"` needed), in another function. It, its
    arguments and its results travel by value, tensors too. A DTensor arrives without its mesh: return
    `.full_tensor()` or `.to_local()`. No rank sees a GPU; ranks on GPUs are torchrun's.
    When the call ends, however it ends, the ranks and the processes they started are gone.

    Args:
        fn: called on every rank.
        args: the same on every rank; take `torch.distributed.get_rank()` in fn for what differs.
        world_size: number of ranks. They share the cores: each has max(1, cores // world_size) threads, or
            OMP_NUM_THREADS if that is fewer.
        timeout: seconds that fn may take, counted from when all ranks are ready.

    Returns:
        What fn returned, by rank.

    Raises:
        Exception: the failure that happened first among the ranks, of its own type, with that rank's
            traceback as its cause. A RuntimeError where that exception cannot be sent or would end this
            process (SystemExit), and where a rank died: it then names the rank and its signal or exit code.
        TimeoutError: fn took too long on some rank; shows the lines on which the ranks stand. If it was
            in `check_in_step`, what that had found is raised, from this error.
        TypeError: fn or args cannot be pickled.
        ValueError: world_size is below 1, or timeout is not above 0.

    Example::

        def add_up(number):
            total = torch.tensor(number + dist.get_rank())
            dist.all_reduce(total)
            return total.item()

        print(run_on_ranks(add_up, 10, world_size=2))  # [21, 21]
    """
    if type(world_size) is not int or world_size < 1:
        raise ValueError(f"run_on_ranks: expected world_size of at least 1, found {world_size!r}")
    if not 0 < timeout <= _LONGEST_S:  # false for nan, too
        raise ValueError(
            f"run_on_ranks: expected a timeout above 0 and at most {_LONGEST_S:,.0f} seconds, found {timeout}"
        )
    try:
        call = cloudpickle.dumps((fn, args))
    except Exception as error:
        raise TypeError(f"run_on_ranks: fn or its arguments cannot be sent to the ranks: {error}") from error

    with tempfile.TemporaryDirectory(prefix="fsdp_utils_") as directory:
        job = Job(
            world_size=world_size,
            directory=Path(directory),
            # A forked rank would have the server's environment, as it was when that was started.
            environ={
                name: value
                for name, value in os.environ.items()
                if not name.startswith(("TORCHELASTIC_", "MASTER_"))
            },
            start_method=multiprocessing.get_start_method(allow_none=True),
            call=call,
            timeout=timeout,
        )
        ranks: list[_Rank] = []
        try:
            for rank in range(world_size):  # appended one by one: _kill is to know all that are started
                ranks.append(_start(rank, job))  # noqa: PERF401
            _receive_all(ranks, "ready", START_LIMIT_S, job)
            _tell(ranks, "go")
            packed = _receive_all(ranks, "result", timeout, job)
            results = [_loads(rank, result) for rank, result in enumerate(packed)]
            _tell(ranks, "done")
            _await_exits(ranks)
            return results
        finally:
            _kill(ranks)


class _Rank(NamedTuple):
    rank: int
    process: BaseProcess
    pipe: Connection
    control: Connection  # what is sent through it ends the rank, as does closing it

    def exited(self) -> str:
        """How this rank ended, in words."""
        self.process.join(1.0)  # a closed pipe is seen before the exit code is known
        code = self.process.exitcode
        if code is None:
            return "closed its connection to the caller (does fn close descriptors that it did not open?)"
        if code < 0:
            names = {one.value: one.name for one in signal.Signals}  # without real-time signals
            return f"was killed by signal {-code} ({names.get(-code, signal.strsignal(-code))})"
        return f"exited with code {code}"


def _start(rank: int, job: Job) -> _Rank:
    with _main_hidden():
        method = _start_method()
        context: Any = multiprocessing.get_context(method)
        (ours, theirs), (control, held) = context.Pipe(), context.Pipe()
        output = CallersOutput() if method == "forkserver" else None
        process = context.Process(
            target=rank_main, args=(rank, job, theirs, held, output), name=f"rank {rank}"
        )
        with theirs, held:  # only the rank's ends stay open, so that its death closes the pipe
            process.start()
    return _Rank(rank, process, ours, control)


def _start_method() -> str:
    set_forkserver_preload(_PRELOAD)
    try:
        ensure_running()
    except ChildProcessError:  # this process is itself a fork; the server it knows is its parent's child
        return "spawn"
    return "forkserver"


_main_lock = threading.Lock()


@contextmanager
def _main_hidden() -> Iterator[None]:
    """Keep multiprocessing from importing the caller's __main__ (a script, pytest, a notebook) in the ranks.

    What fn needs from __main__ travels with it; running the file again would start ranks in the ranks.
    """
    with _main_lock:
        main = sys.modules["__main__"]
        sys.modules["__main__"] = types.ModuleType("__main__")
        try:
            yield
        finally:
            sys.modules["__main__"] = main


def _receive_all(ranks: list[_Rank], expected: str, timeout: float, job: Job) -> list[Any]:
    """The next message of each rank, by rank; raises the failure that happened first."""
    waiting = {rank.rank: rank for rank in ranks}
    received: dict[int, Any] = {}
    failures: list[tuple[int, BaseException]] = []  # (when, what)
    limit = time.monotonic() + timeout
    while waiting and (left := limit - time.monotonic()) > 0:
        wait([source for rank in waiting.values() for source in (rank.pipe, rank.process.sentinel)], left)
        for rank in list(waiting.values()):
            try:
                if not rank.pipe.poll() and rank.process.exitcode is None:
                    continue
                kind, content = rank.pipe.recv()
            except (EOFError, OSError):
                # A death is never the consequence of an exception elsewhere, but the other way round it
                # is the rule (connection closed by peer): so it counts as the earliest.
                died = RuntimeError(f"run_on_ranks: rank {rank.rank} {rank.exited()} before fn returned")
                failures.append((0, died))
            else:
                if kind == "failure":
                    when, error = content
                    failures.append((when, unpack_error(error, f"rank {rank.rank} of {len(ranks)}")))
                received[rank.rank] = content
            del waiting[rank.rank]
            if failures:
                limit = min(limit, time.monotonic() + _BLAME_S)
    if failures:
        raise min(failures, key=lambda failure: failure[0])[1]
    if waiting and expected == "ready":
        raise TimeoutError(f"run_on_ranks: ranks {sorted(waiting)} were not ready after {timeout:g} s")
    if waiting:
        stood = TimeoutError(_stacks(sorted(waiting), job))
        if (found := read_finding(job.directory / "finding")) is not None:
            raise found from stood
        raise stood
    return [received[rank.rank] for rank in ranks]


def _stacks(waiting: list[int], job: Job) -> str:
    """The lines on which the ranks stand."""
    time.sleep(_BLAME_S)  # their faulthandlers went off at this moment
    lines = [f"run_on_ranks: fn did not return on ranks {waiting} within {job.timeout:g} s. They stand at:"]
    for rank in range(job.world_size):
        if rank in waiting:
            lines += [f"rank {rank}:", _read_stack(job.stack_of(rank))]
        else:
            lines.append(f"rank {rank}: has returned")
    return "\n".join(lines)


def _read_stack(path: Path) -> str:
    """The main thread's part of a faulthandler dump, from fn inwards, as a Python traceback reads."""
    text = path.read_text() if path.exists() else ""
    main_thread = re.split(r"^(?:Current t|T)hread .*$", text, flags=re.MULTILINE)[-1]  # it is written last
    frames = []
    for file, line, name in re.findall(r'^  File "(.*)", line (\d+) in (.*)$', main_thread, re.MULTILINE):
        if file == rank_process.__file__ and name == rank_main.__name__:
            break
        frames.append((file, int(line), name, linecache.getline(file, int(line)).strip()))
    if not frames:
        return "  (no stack: the process did not answer)"
    return "".join(traceback.format_list(frames[::-1])).rstrip()


def _loads(rank: int, result: bytes) -> Any:
    try:
        return pickle.loads(result)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # unpickling runs the caller's code, which may raise SystemExit as well
        raise RuntimeError(
            f"run_on_ranks: what rank {rank} returned cannot be read here: {type(error).__name__}: {error}. "
            "Return plain values and whole tensors (DTensor.full_tensor())."
        ) from error


def _tell(ranks: list[_Rank], word: str) -> None:
    for rank in ranks:
        with suppress(OSError):  # a rank that is gone is noticed where its answer is awaited
            rank.pipe.send(word)


def _await_exits(ranks: list[_Rank]) -> None:
    limit = time.monotonic() + _EXIT_S
    for rank in ranks:
        rank.process.join(max(0.0, limit - time.monotonic()))


def _kill(ranks: list[_Rank]) -> None:
    """End the ranks and all that they started."""
    for rank in ranks:
        with suppress(OSError):  # the rank and its supervisor are gone
            rank.control.send("end")
    _await_exits(ranks)
    for rank in ranks:
        rank.process.kill()  # a supervisor that does not answer; the rank ends with it
        rank.process.join(_EXIT_S)
        if rank.process.exitcode is not None:
            rank.process.close()
        rank.pipe.close()
        rank.control.close()
