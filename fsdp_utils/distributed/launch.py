"""Run a function on several ranks of this machine and bring back what each returns, or the first failure."""

import linecache
import pickle
import re
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle

from fsdp_utils.distributed import rank_process
from fsdp_utils.distributed.rank_errors import read_finding, unpack_error
from fsdp_utils.distributed.rank_process import START_LIMIT_S, call_function, stack_file
from fsdp_utils.distributed.rank_processes import (
    EXIT_S,
    Ended,
    RankProcess,
    receive,
    start_rank,
    start_server,
)
from fsdp_utils.torch_internals.names import DYNAMO

# Imported once by the server, so that the ranks, which are forked from it, need not import it.
PRELOAD = [
    DYNAMO,  # fully_shard imports it: most of a second on each rank
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.distributed.checkpoint.state_dict",
    "fsdp_utils.distributed.rank_process",
]
_LONGEST_S = 1e6  # eleven days; faulthandler's clock overflows later
_BLAME_S = 0.3  # after the first failure arrived, how long to wait for one that happened earlier


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
        Exception: the failure that happened first among the ranks, of the type that was raised there, with
            that rank's traceback as its cause. A RuntimeError where that exception cannot be sent or would
            end this process (SystemExit), and where a rank died: it names the rank and its exit code.
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

    main = f"{call_function.__module__}:{call_function.__name__}"
    with tempfile.TemporaryDirectory(prefix="fsdp_utils_") as name:
        directory = Path(name)
        ranks: list[RankProcess] = []
        try:
            method = start_server(PRELOAD)
            for rank in range(world_size):  # appended one by one: all that are started are to be ended
                ranks.append(start_rank(method, main, rank, directory, world_size, call, timeout))  # noqa: PERF401
            _receive_all(ranks, START_LIMIT_S, directory, during_start=True)
            for rank in ranks:
                rank.send("go")
            results = list(map(_read_result, ranks, _receive_all(ranks, timeout, directory)))
            for rank in ranks:
                rank.send("done")
            for rank in ranks:
                rank.process.join(EXIT_S)
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
            del waiting[rank.rank]
            if isinstance(message, Ended):
                # A death is never the consequence of an exception elsewhere, but the other way round it
                # is the rule (connection closed by peer): so it counts as the earliest.
                text = f"run_on_ranks: rank {rank.rank} {message} before fn returned"
                failures.append((0, RuntimeError(text)))
            elif message[0] == "failure":
                when, error = message[1]
                failures.append((when, unpack_error(error, f"rank {rank.rank} of {len(ranks)}")))
            else:
                received[rank.rank] = message[1]
            if failures:
                limit = min(limit, time.monotonic() + _BLAME_S)
    if failures:
        raise min(failures, key=lambda failure: failure[0])[1]
    if waiting and during_start:
        raise TimeoutError(f"run_on_ranks: ranks {sorted(waiting)} were not ready after {timeout:g} s")
    if waiting:
        time.sleep(_BLAME_S)  # the faulthandlers of the ranks went off at this moment
        lines = [f"run_on_ranks: fn did not return on ranks {sorted(waiting)} within {timeout:g} s."]
        lines.append("They stand at:")
        for rank in ranks:
            stood = f"\n{_stack(rank, directory)}" if rank.rank in waiting else " has returned"
            lines.append(f"rank {rank.rank}:{stood}")
        stood_at = TimeoutError("\n".join(lines))
        if (found := read_finding(directory / "finding")) is not None:
            raise found from stood_at
        raise stood_at
    return [received[rank.rank] for rank in ranks]


def _stack(rank: RankProcess, directory: Path) -> str:
    """The main thread's part of a faulthandler dump, from fn inwards, as a Python traceback reads."""
    path = stack_file(directory, rank.rank)
    text = path.read_text() if path.exists() else ""
    main_thread = re.split(r"^(?:Current t|T)hread .*$", text, flags=re.MULTILINE)[-1]  # it is written last
    frames = []
    for file, line, name in re.findall(r'^  File "(.*)", line (\d+) in (.*)$', main_thread, re.MULTILINE):
        if file == rank_process.__file__ and name == call_function.__name__:
            break
        frames.append((file, int(line), name, linecache.getline(file, int(line)).strip()))
    if not frames:
        return "  (no stack: the process did not answer)"
    return "".join(traceback.format_list(frames[::-1])).rstrip()


def _read_result(rank: RankProcess, result: bytes) -> Any:
    try:
        return pickle.loads(result)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # unpickling runs the caller's code, which may raise SystemExit as well
        raise RuntimeError(
            f"run_on_ranks: what rank {rank.rank} returned cannot be read here: {type(error).__name__}: "
            f"{error}. Return plain values and whole tensors (DTensor.full_tensor())."
        ) from error
