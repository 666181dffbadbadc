"""Run a function on several ranks of this machine and bring back what each returns, or the first failure.

The ranks are CPU processes, forked from a server that has torch imported (spawned where fork does not
exist), with a gloo process group that listens on the loopback interface only.
"""

import faulthandler
import io
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
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

import cloudpickle
import torch
import torch.distributed as dist

if sys.platform == "linux":
    import fcntl

_METHOD = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"
# What the server imports once, so that no rank has to.
_PRELOAD = [
    "torch._dynamo",  # fully_shard imports it: most of a second on each rank
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.distributed.checkpoint.state_dict",
    __name__,
]

_START_LIMIT_S = 120.0  # for all ranks to have a process group; the first call imports torch in the server
_BLAME_S = 0.3  # after the first bad news, how long to listen for a failure that happened even earlier
_EXIT_S = 5.0  # for a rank to leave once its result is here


class RankTraceback(Exception):
    """The traceback of an exception on another rank; shown as the cause of the one raised here."""


def run_on_ranks(fn: Callable[..., Any], *args: Any, world_size: int = 2, timeout: float = 60.0) -> list[Any]:
    """What does `fn(*args)` return on each of `world_size` ranks on this machine's CPU?

    Inside fn the gloo process group is initialised, and RANK, LOCAL_RANK, WORLD_SIZE and so on are set as
    torchrun sets them (without MASTER_ADDR and MASTER_PORT: there is no port). fn may be defined anywhere:
    in a notebook cell, in a script (no `if __name__ == "__main__"` needed), in another function. It, its
    arguments and its results travel by value, tensors too. A DTensor arrives without its mesh: return
    `.full_tensor()` or `.to_local()`.
    When the call ends, however it ends, the ranks and the processes they started are gone.

    Args:
        fn: called on every rank.
        args: the same on every rank; take `torch.distributed.get_rank()` in fn for what differs.
        world_size: number of ranks. They share the cores: each has max(1, cores // world_size) threads.
        timeout: seconds that fn may take, counted from when all ranks are ready.

    Returns:
        What fn returned, by rank.

    Raises:
        Exception: the failure that happened first among the ranks, of its own type, with that rank's
            traceback as its cause. A RuntimeError where that exception cannot be sent or would end this
            process (SystemExit), and where a rank died: it then names the rank and its signal or exit code.
        TimeoutError: fn took too long on some rank; shows the lines on which the ranks stand.
        TypeError: fn or args cannot be pickled.
    """
    if world_size < 1:
        raise ValueError(f"run_on_ranks: expected world_size of at least 1, found {world_size}")
    if timeout <= 0:
        raise ValueError(f"run_on_ranks: expected a timeout above 0 seconds, found {timeout}")
    try:
        call = cloudpickle.dumps((fn, args))
    except Exception as error:
        raise TypeError(f"run_on_ranks: fn or its arguments cannot be sent to the ranks: {error}") from error

    with tempfile.TemporaryDirectory(prefix="fsdp_utils_") as directory:
        job = _Job(
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
            return _collect(ranks, timeout)
        finally:
            _kill(ranks)


class _Job(NamedTuple):
    """What each rank is told."""

    world_size: int
    directory: Path
    environ: dict[str, str]
    start_method: str | None  # of multiprocessing, for what fn starts
    call: bytes
    timeout: float

    def stack_of(self, rank: int) -> Path:
        """Where the faulthandler of that rank writes on timeout."""
        return self.directory / f"stack_{rank}"


# ---- in the caller ---------------------------------------------------------------------------------


class _Rank(NamedTuple):
    rank: int
    process: BaseProcess
    pipe: Connection
    stack: Path

    def exited(self) -> str:
        """How this rank ended, in words."""
        self.process.join(1.0)  # a closed pipe is seen before the exit code is known
        code = self.process.exitcode
        if code is None:
            return "closed its connection"
        if code < 0:
            return f"was killed by signal {-code} ({signal.Signals(-code).name})"
        return f"exited with code {code}"


def _start(rank: int, job: _Job) -> _Rank:
    context: Any = multiprocessing.get_context(_METHOD)
    context.set_forkserver_preload(_PRELOAD)
    ours, theirs = context.Pipe()
    process = context.Process(target=_rank_main, args=(rank, job, theirs), name=f"rank {rank}")
    try:
        with _main_hidden():
            process.start()
    except BaseException:
        ours.close()
        raise
    finally:
        theirs.close()
    return _Rank(rank, process, ours, job.stack_of(rank))


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


def _collect(ranks: list[_Rank], timeout: float) -> list[Any]:
    """Take the ranks through ready, go, result and done."""
    _hear_all(ranks, "ready", _START_LIMIT_S)
    for rank in ranks:
        _tell(rank, "go")
    results = [_loads(rank, packed) for rank, packed in enumerate(_hear_all(ranks, "result", timeout))]
    for rank in ranks:
        _tell(rank, "done")
    limit = time.monotonic() + _EXIT_S
    for rank in ranks:
        rank.process.join(max(0.0, limit - time.monotonic()))
    return results


def _hear_all(ranks: list[_Rank], expected: str, timeout: float) -> list[Any]:
    """The message that each rank sends next, by rank; raises what went wrong first."""
    waiting = {rank.rank: rank for rank in ranks}
    heard: dict[int, Any] = {}
    failures: list[tuple[int, BaseException]] = []  # (when, what)
    limit = time.monotonic() + timeout
    while waiting and (left := limit - time.monotonic()) > 0:
        wait([source for rank in waiting.values() for source in (rank.pipe, rank.process.sentinel)], left)
        for rank in list(waiting.values()):
            try:
                if rank.pipe.poll():
                    kind, content = rank.pipe.recv()
                elif rank.process.exitcode is not None:
                    raise EOFError
                else:
                    continue
            except (EOFError, OSError):
                # A death is never the consequence of an exception elsewhere, but the other way round it
                # is the rule (connection closed by peer): so it counts as the earliest.
                failures.append(
                    (0, RuntimeError(f"run_on_ranks: rank {rank.rank} {rank.exited()} before fn returned"))
                )
            else:
                if kind == "failure":
                    when, error = content
                    failures.append((when, unpack_error(error, f"rank {rank.rank} of {len(ranks)}")))
                else:
                    assert kind == expected, (kind, expected)
                    heard[rank.rank] = content
            del waiting[rank.rank]
            if failures:
                limit = min(limit, time.monotonic() + _BLAME_S)
    if failures:
        raise min(failures, key=lambda failure: failure[0])[1]
    if waiting:
        raise TimeoutError(_where_they_stand(ranks, waiting, expected, timeout))
    return [heard[rank.rank] for rank in ranks]


def _where_they_stand(ranks: list[_Rank], waiting: dict[int, _Rank], expected: str, timeout: float) -> str:
    if expected == "ready":
        return f"run_on_ranks: ranks {sorted(waiting)} were not ready after {timeout:g} s"
    lines = [
        f"run_on_ranks: fn did not return on ranks {sorted(waiting)} within {timeout:g} s. They stand at:"
    ]
    time.sleep(_BLAME_S)  # their faulthandlers went off at this moment
    for rank in ranks:
        lines.append(f"rank {rank.rank}:" if rank.rank in waiting else f"rank {rank.rank}: has returned")
        if rank.rank in waiting:
            lines.append(_read_stack(rank.stack))
    return "\n".join(lines)


def _read_stack(path: Path) -> str:
    """The main thread's part of a faulthandler dump, from fn inwards, as a Python traceback reads."""
    text = path.read_text() if path.exists() else ""
    main_thread = re.split(r"^(?:Current t|T)hread .*$", text, flags=re.MULTILINE)[-1]  # it is written last
    frames = []
    for file, line, name in re.findall(
        r'^  File "(.*)", line (\d+) in (.*)$', main_thread, flags=re.MULTILINE
    ):
        if file == __file__ and name == _rank_main.__name__:
            break
        frames.append((file, int(line), name, linecache.getline(file, int(line)).strip()))
    if not frames:
        return "  (no stack: the process did not answer)"
    return "".join(traceback.format_list(frames[::-1])).rstrip()


def _loads(rank: int, result: bytes) -> Any:
    try:
        return pickle.loads(result)
    except Exception as error:
        raise RuntimeError(
            f"run_on_ranks: what rank {rank} returned cannot be read here: {type(error).__name__}: {error}. "
            "Return plain values and whole tensors (DTensor.full_tensor())."
        ) from error


def _tell(rank: _Rank, word: str) -> None:
    with suppress(OSError):  # a rank that is gone is noticed where its answer is awaited
        rank.pipe.send(word)


def _kill(ranks: list[_Rank]) -> None:
    for rank in ranks:
        # Each rank leads a process group of its own: this ends what it started, too.
        if hasattr(os, "killpg") and rank.process.pid is not None:
            with suppress(OSError):
                os.killpg(rank.process.pid, signal.SIGKILL)
        rank.process.kill()
    for rank in ranks:
        rank.process.join(_EXIT_S)
        if rank.process.exitcode is not None:
            rank.process.close()
        rank.pipe.close()


# ---- in each rank ----------------------------------------------------------------------------------


def _rank_main(rank: int, job: _Job, pipe: Connection) -> None:
    _end_with_caller()
    with job.stack_of(rank).open("w") as stack_file:
        try:
            _be_rank(rank, job)
            pipe.send(("ready", None))
            pipe.recv()
            faulthandler.dump_traceback_later(job.timeout, file=stack_file)
            fn, args = cloudpickle.loads(job.call)
            message = "result", _dumps(fn(*args))
        except BaseException as error:
            message = "failure", (time.monotonic_ns(), pack_error(error))
        faulthandler.cancel_dump_traceback_later()
        pipe.send(message)
        # Stay until everybody is done: were the group to close now, peers would fail in their collectives,
        # and the caller would have to tell their failures from the first. After a failure SIGKILL ends this.
        pipe.recv()
    if dist.is_initialized():
        dist.destroy_process_group()


def _end_with_caller() -> None:
    """See to it that this rank, with all it starts, ends when the caller does, even by SIGKILL."""
    if hasattr(os, "setpgid"):
        os.setpgid(0, 0)  # also: Ctrl-C in the terminal reaches the caller alone
    parent = multiprocessing.parent_process()
    assert parent is not None
    pipe = parent.sentinel  # nothing comes through it; it closes when the caller ends

    def watch() -> None:
        wait([pipe])
        if hasattr(os, "killpg"):
            os.killpg(0, signal.SIGKILL)
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="end with caller").start()
    if sys.platform == "linux":
        # The thread cannot run while C code holds the GIL. The kernel always can: have it send SIGKILL to
        # the whole process group on the next event of the pipe.
        fcntl.fcntl(pipe, fcntl.F_SETOWN, -os.getpid())
        fcntl.fcntl(pipe, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(pipe, fcntl.F_SETFL, fcntl.fcntl(pipe, fcntl.F_GETFL) | os.O_ASYNC)


def _be_rank(rank: int, job: _Job) -> None:
    """Set up the process as torchrun and a training script would, and make the process group."""
    multiprocessing.set_start_method(job.start_method, force=True)  # as in the caller, for DataLoader workers
    os.environ.clear()
    os.environ.update(job.environ)
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        GROUP_RANK="0",
        WORLD_SIZE=str(job.world_size),
        LOCAL_WORLD_SIZE=str(job.world_size),
    )
    # gloo takes its interface from here, and would otherwise listen on the one that the host name leads to.
    if loopback := {"linux": "lo", "darwin": "lo0"}.get(sys.platform):
        os.environ["GLOO_SOCKET_IFNAME"] = loopback
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # a rank that is killed has still shown its prints
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    torch.set_num_threads(max(1, cores // job.world_size))
    dist.init_process_group(
        "gloo",
        # A file: no port to find, and none that others could reach.
        init_method=f"file://{(job.directory / 'store').as_posix()}",
        rank=rank,
        world_size=job.world_size,
        timeout=timedelta(seconds=job.timeout + _START_LIMIT_S),  # the caller's timeout is to come first
    )


def _dumps(result: Any) -> bytes:
    try:
        return cloudpickle.dumps(result)
    except Exception as error:
        raise TypeError(f"what fn returned cannot be sent to the caller: {error}") from error


# ---- exceptions between processes ------------------------------------------------------------------


def pack_error(error: BaseException) -> bytes:
    """An exception, caught where this is called, as bytes for another process."""
    frames = error.__traceback__
    if frames is not None and frames.tb_next is not None:
        frames = frames.tb_next  # the frame that caught it says nothing to a reader
    text = "".join(traceback.format_exception(type(error), error, frames))
    summary = traceback.format_exception_only(type(error), error)[-1].strip()
    try:
        body = cloudpickle.dumps(error)
    except Exception:
        body = b""
    return pickle.dumps((body, summary, text))


def unpack_error(packed: bytes, where: str) -> BaseException:
    """The exception again, or a RuntimeError that tells of it; its cause holds the original traceback."""
    body, summary, text = pickle.loads(packed)
    try:
        error = pickle.loads(body)
    except Exception:
        error = None
    # SystemExit and its like would end this process, quietly, for what happened in another.
    if not isinstance(error, BaseException) or isinstance(
        error, SystemExit | KeyboardInterrupt | GeneratorExit
    ):
        error = RuntimeError(f"{where}: {summary}")
    error.__cause__ = RankTraceback(f"{where}\n\n{text}")
    return error
