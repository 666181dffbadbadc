"""Run a function on several ranks of this machine and bring back what each returns, or the first failure."""

import faulthandler
import io
import os
import re
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from itertools import takewhile
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import cloudpickle
import torch
import torch.distributed as dist

from fsdp_utils.distributed import rank_processes
from fsdp_utils.distributed.agreement import usable_cores
from fsdp_utils.distributed.rank_errors import pack_error, unpack_error, unpickle
from fsdp_utils.distributed.rank_processes import Ended, RankProcess, receive
from fsdp_utils.torch_internals.names import DYNAMO
from fsdp_utils.torch_internals.runtime import hide_apple_gpu

# imported once by the server that the ranks are forked from
PRELOAD = [
    DYNAMO,  # fully_shard imports it: most of a second on each rank
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.distributed.checkpoint.state_dict",
    "fsdp_utils.distributed.launch",
]
_START_LIMIT_S = 120.0  # for all ranks to have a process group; the first call imports torch in the server
_BLAME_S = 0.3  # after the first failure arrived, how long to wait for one that happened earlier


def run_on_ranks(fn: Callable[..., Any], *args: Any, world_size: int = 2, timeout: float = 60.0) -> list[Any]:
    """Run `fn(*args)` on each of `world_size` ranks of this machine and return what each rank returned.

    Inside fn the process group is initialised, and RANK, LOCAL_RANK, WORLD_SIZE and so on are set as
    torchrun sets them (without MASTER_ADDR: there is no port). fn may be defined anywhere (no
    `if __name__ == "__main__"` needed). It, its arguments and its results travel by value, tensors too; of a
    DTensor return `.full_tensor()` or `.to_local()`. No rank sees a GPU: use torchrun for those. When the
    call ends, the ranks and all that they started are gone.

    Args:
        fn: called on every rank.
        args: the same on every rank; take `torch.distributed.get_rank()` in fn for what differs.
        world_size: number of ranks, which share the cores (or have OMP_NUM_THREADS, if that is fewer).
        timeout: seconds that fn may take, counted from when all ranks are ready.

    Returns:
        What fn returned, by rank.

    Raises:
        Exception: the failure that happened first among the ranks, with that rank's traceback as its cause.
        RuntimeError: that exception cannot be sent or would end this process, or a rank died: says how.
        TimeoutError: fn took too long on some rank; shows the lines on which the ranks stand.
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
    if not timeout > 0:  # true for nan, too
        raise ValueError(f"run_on_ranks: expected a timeout above 0, found {timeout}")
    try:
        call = cloudpickle.dumps((fn, args))
    except Exception as error:
        raise TypeError(f"run_on_ranks: fn or its arguments cannot be sent to the ranks: {error}") from error

    with tempfile.TemporaryDirectory(prefix="fsdp_utils_") as name:
        directory = Path(name)
        ranks: list[RankProcess] = []
        try:
            method = rank_processes.start_server(PRELOAD)
            for rank in range(world_size):  # appended one by one: all that are started are to be ended
                on_rank = f"{__name__}:_call_function", rank, directory, world_size, call, timeout
                ranks.append(rank_processes.start_rank(method, *on_rank))
            _receive_all(ranks, _START_LIMIT_S, directory, during_start=True)
            for rank in ranks:
                rank.send("go")
            packed = _receive_all(ranks, timeout, directory)
            results = [unpickle(one, f"run_on_ranks: what rank {n} returned") for n, one in enumerate(packed)]
            for rank in ranks:
                rank.send("done")
            limit = time.monotonic() + rank_processes.EXIT_S
            for rank in ranks:
                rank.process.join(max(0.0, limit - time.monotonic()))
            return results
        finally:
            for rank in ranks:
                rank.end()
            for rank in ranks:
                rank.close()


def _receive_all(
    ranks: list[RankProcess], timeout: float, directory: Path, *, during_start: bool = False
) -> list[Any]:
    """The next message of each rank, by rank; raises the failure that happened first."""
    waiting = {rank.rank: rank for rank in ranks}
    received: dict[int, Any] = {}
    failures: list[tuple[int, BaseException]] = []  # (when, what)
    limit = time.monotonic() + timeout
    while waiting and (left := limit - time.monotonic()) > 0:
        for rank, message in receive(waiting.values(), left):
            if isinstance(message, Ended):  # it counts as the earliest: others fail as it closes connections
                text = f"run_on_ranks: rank {rank.rank} {message} before fn returned"
                failures.append((0, RuntimeError(text)))
            elif message[0] == "failure":
                when, error = message[1]
                failures.append((when, unpack_error(error, f"rank {rank.rank} of {len(ranks)}")))
            else:
                received[rank.rank] = message[1]
            del waiting[rank.rank]
            if failures:
                limit = min(limit, time.monotonic() + _BLAME_S)
    if failures:
        raise min(failures, key=lambda failure: failure[0])[1]
    if waiting:
        if during_start:
            raise TimeoutError(f"run_on_ranks: ranks {sorted(waiting)} were not ready after {timeout:g} s")
        time.sleep(_BLAME_S)  # the faulthandlers of the ranks went off at this moment
        stood = [f"\n{_stack(n, directory)}" if n in waiting else " has returned" for n in range(len(ranks))]
        lines = [f"run_on_ranks: fn did not return on ranks {sorted(waiting)} within {timeout:g} s."]
        lines += ["They stand at:", *(f"rank {number}:{place}" for number, place in enumerate(stood))]
        raise TimeoutError("\n".join(lines))
    return [received[rank.rank] for rank in ranks]


def _stack(rank: int, directory: Path) -> str:
    """The main thread's part of a faulthandler dump, from fn inwards, as a Python traceback reads."""
    file = directory / f"stack_{rank}"
    text = file.read_text() if file.exists() else ""
    main_thread = re.split(r"^(?:Current t|T)hread .*$", text, flags=re.MULTILINE)[-1]  # it is written last
    found = re.findall(r'^  File "(.*)", line (\d+) in (.*)$', main_thread, re.MULTILINE)
    inner = takewhile(lambda frame: frame[::2] != (__file__, _call_function.__name__), found)
    frames = [traceback.FrameSummary(name, int(line), function) for name, line, function in inner]
    return "".join(traceback.format_list(frames[::-1])).rstrip() or "  (no stack: the process did not answer)"


# ---- on a rank ----


def set_up(rank: int, world_size: int, *, gpu: bool = False) -> None:
    """Set the environment and the threads of a rank, which without `gpu` must not find one."""
    os.environ.update(dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank)), GROUP_RANK="0")
    os.environ.update(dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(world_size)))
    # gloo would otherwise listen on another interface
    os.environ["GLOO_SOCKET_IFNAME"] = "lo" if sys.platform == "linux" else "lo0"
    if not gpu:
        # HIP (ROCm) takes an empty list for none given.
        os.environ.update(CUDA_VISIBLE_DEVICES="", HIP_VISIBLE_DEVICES="-1")
        hide_apple_gpu()
    limit = os.environ.get("OMP_NUM_THREADS", "")
    threads = usable_cores() // world_size
    torch.set_num_threads(max(1, min(threads, int(limit)) if limit.isdecimal() else threads))


def _call_function(
    rank: int, pipe: Connection, directory: Path, world_size: int, call: bytes, timeout: float
) -> None:
    """Join the process group, call the function, and send what it returns, or its failure."""
    for name in [name for name in os.environ if name.startswith(("TORCHELASTIC_", "MASTER_"))]:
        del os.environ[name]
    try:
        set_up(rank, world_size)
        if isinstance(sys.stdout, io.TextIOWrapper):
            # A killed rank has still shown its prints; a line arrives whole, under PYTHONUNBUFFERED too.
            sys.stdout.reconfigure(line_buffering=True, write_through=False)
        store = f"file://{directory.as_posix()}/store"  # a file: no port that others could reach
        limit = timedelta(seconds=timeout + _START_LIMIT_S)  # the caller's timeout comes first
        dist.init_process_group("gloo", store, limit, world_size, rank)
        pipe.send(("ready", None))
        pipe.recv()  # all are connected: fn may destroy the group at once
        faulthandler.dump_traceback_later(timeout, file=(directory / f"stack_{rank}").open("w"))
        fn, args = cloudpickle.loads(call)
        message = "result", cloudpickle.dumps(fn(*args))
    except BaseException as error:
        message = "failure", (time.monotonic_ns(), pack_error(error))
    faulthandler.cancel_dump_traceback_later()
    try:
        pipe.send(message)
        # Stay until everybody is done: were the group to close now, peers would fail in their collectives.
        # After a failure SIGKILL ends this.
        pipe.recv()
    except (EOFError, OSError):  # the caller has gone, or fn has closed descriptors that it had not opened
        os._exit(1)
    if dist.is_initialized():
        dist.destroy_process_group()
