"""Run a function on several ranks of this machine and bring back what each returns, or the first failure.

The ranks are processes forked from a server that has torch imported (spawned where fork does not exist, or
where they use GPUs). Their process group, gloo or NCCL, listens on the loopback interface only.
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
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

import cloudpickle
import torch

from fsdp_utils.distributed import rank_process
from fsdp_utils.distributed.rank_errors import unpack_error
from fsdp_utils.distributed.rank_process import EXIT_CUT_OFF, START_LIMIT_S, CallersOutput, Job, rank_main

_PRELOAD = ["fsdp_utils.distributed.preload"]

_LONGEST_S = 1e6  # eleven days; faulthandler's clock overflows later
_BLAME_S = 0.3  # after the first failure arrived, how long to wait for one that happened earlier
_EXIT_S = 5.0  # for a rank to leave once its result is here


def run_on_ranks(
    fn: Callable[..., Any], *args: Any, world_size: int = 2, timeout: float = 60.0, device: str = "cpu"
) -> list[Any]:
    """Run `fn(*args)` on each of `world_size` ranks of this machine and return what each rank returned.

    Inside fn the process group is initialised, and RANK, LOCAL_RANK, WORLD_SIZE and so on are set as
    torchrun sets them (without MASTER_ADDR and MASTER_PORT: there is no port). fn may be defined anywhere:
    in a notebook cell, in a script (no `if __name__ == "__main__"` needed), in another function. It, its
    arguments and its results travel by value, tensors too. A DTensor arrives without its mesh: return
    `.full_tensor()` or `.to_local()`.
    When the call ends, however it ends, the ranks and the processes they started are gone.

    Args:
        fn: called on every rank.
        args: the same on every rank; take `torch.distributed.get_rank()` in fn for what differs.
        world_size: number of ranks. They share the cores: each has max(1, cores // world_size) threads, or
            OMP_NUM_THREADS if that is fewer.
        timeout: seconds that fn may take, counted from when all ranks are ready.
        device: "cpu": a gloo process group, and no rank sees a GPU. "cuda": one GPU for each rank, its
            current device; NCCL for CUDA tensors, gloo for CPU tensors. These ranks take longer to start.

    Returns:
        What fn returned, by rank.

    Raises:
        Exception: the failure that happened first among the ranks, of its own type, with that rank's
            traceback as its cause. A RuntimeError where that exception cannot be sent or would end this
            process (SystemExit), and where a rank died: it then names the rank and its signal or exit code.
        TimeoutError: fn took too long on some rank; shows the lines on which the ranks stand.
        TypeError: fn or args cannot be pickled.
        ValueError: world_size is below 1, timeout is not above 0, or the device is unknown.
        RuntimeError: there are fewer GPUs than ranks, for device="cuda"; this process is daemonic.

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
    if device not in ("cpu", "cuda"):
        raise ValueError(f'run_on_ranks: expected device "cpu" or "cuda", found {device!r}')
    if device == "cuda" and (gpus := torch.cuda.device_count()) < world_size:
        why = " (this torch is a build without CUDA)" if not torch.backends.cuda.is_built() else ""
        raise RuntimeError(
            f'run_on_ranks: device="cuda" takes a GPU for each rank: expected {world_size}, found {gpus}{why}'
            '. Ask for fewer ranks, or for device="cpu".'
        )
    if multiprocessing.current_process().daemon:
        raise RuntimeError(
            "run_on_ranks: this process is daemonic (a worker of a multiprocessing.Pool or of a DataLoader), "
            "and Python lets such a process start no others. Call run_on_ranks from the main process or a "
            "concurrent.futures.ProcessPoolExecutor, whose workers are not daemonic."
        )
    try:
        call = cloudpickle.dumps((fn, args))
    except Exception as error:
        raise TypeError(f"run_on_ranks: fn or its arguments cannot be sent to the ranks: {error}") from error

    with tempfile.TemporaryDirectory(prefix="fsdp_utils_") as directory:
        job = Job(
            world_size=world_size,
            device=device,
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


class _Rank(NamedTuple):
    rank: int
    process: BaseProcess
    pipe: Connection
    control: Connection  # what is sent through it ends the rank, as does closing it
    stack: Path

    def exited(self) -> str:
        """How this rank ended, in words."""
        self.process.join(1.0)  # a closed pipe is seen before the exit code is known
        code = self.process.exitcode
        if code in (None, EXIT_CUT_OFF):
            return "closed its connection to the caller (does fn close descriptors that it did not open?)"
        if code < 0:
            return f"was killed by signal {-code} ({_signal_name(-code)})"
        return f"exited with code {code}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # real-time signals have no names of their own
        return f"SIGRTMIN+{number - signal.SIGRTMIN}"


def _start(rank: int, job: Job) -> _Rank:
    with _main_hidden():
        method = _start_method(job.device)
        context: Any = multiprocessing.get_context(method)
        (ours, theirs), (control, held) = context.Pipe(), context.Pipe()
        output = CallersOutput() if method == "forkserver" else None
        process = context.Process(
            target=rank_main, args=(rank, job, theirs, held, output), name=f"rank {rank}"
        )
        try:
            process.start()
        except BaseException:
            ours.close()
            control.close()
            raise
        finally:
            theirs.close()
            held.close()
    return _Rank(rank, process, ours, control, job.stack_of(rank))


def _start_method(device: str) -> str:
    if device == "cuda" or "forkserver" not in multiprocessing.get_all_start_methods():
        return "spawn"  # for CUDA, as a fork of a process that has asked for GPUs cannot use them
    from multiprocessing.forkserver import ensure_running, set_forkserver_preload

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


def _collect(ranks: list[_Rank], timeout: float) -> list[Any]:
    """Exchange the messages ready, go, result and done with each rank; returns the results."""
    _receive_all(ranks, "ready", START_LIMIT_S)
    for rank in ranks:
        _tell(rank, "go")
    results = [_loads(rank, packed) for rank, packed in enumerate(_receive_all(ranks, "result", timeout))]
    for rank in ranks:
        _tell(rank, "done")
    limit = time.monotonic() + _EXIT_S
    for rank in ranks:
        rank.process.join(max(0.0, limit - time.monotonic()))
    return results


def _receive_all(ranks: list[_Rank], expected: str, timeout: float) -> list[Any]:
    """The next message of each rank, by rank; raises the failure that happened first."""
    waiting = {rank.rank: rank for rank in ranks}
    received: dict[int, Any] = {}
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
                    received[rank.rank] = content
            del waiting[rank.rank]
            if failures:
                limit = min(limit, time.monotonic() + _BLAME_S)
    if failures:
        raise min(failures, key=lambda failure: failure[0])[1]
    if waiting:
        raise TimeoutError(_stacks(ranks, waiting, expected, timeout))
    return [received[rank.rank] for rank in ranks]


def _stacks(ranks: list[_Rank], waiting: dict[int, _Rank], expected: str, timeout: float) -> str:
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


def _tell(rank: _Rank, word: str) -> None:
    with suppress(OSError):  # a rank that is gone is noticed where its answer is awaited
        rank.pipe.send(word)


def _kill(ranks: list[_Rank]) -> None:
    """End the ranks and all that they started."""
    for rank in ranks:
        with suppress(OSError):  # the rank and its supervisor are gone
            rank.control.send("end")
    limit = time.monotonic() + _EXIT_S
    for rank in ranks:
        rank.process.join(max(0.0, limit - time.monotonic()))
    for rank in ranks:
        if rank.process.exitcode is None:
            # The supervisor does not answer. It leads the process group of the rank and its children.
            if hasattr(os, "killpg") and rank.process.pid is not None:
                with suppress(OSError):
                    os.killpg(rank.process.pid, signal.SIGKILL)
            rank.process.kill()
            rank.process.join(_EXIT_S)
        if rank.process.exitcode is not None:
            rank.process.close()
        rank.pipe.close()
        rank.control.close()
