"""Real ranks in a notebook: cells under `%%ranks` run on every rank, as a script does under torchrun::

    from fsdp_utils.notebook import ranks
    ranks.start()             # 4 processes in one process group: gloo on CPU, nccl on two GPUs or more

    %%ranks                   # first line of a cell: run it on every rank; `%%ranks 1,3` on some
    model = fully_shard(model)

    ranks.get("loss.item()")  # its value on each rank: [2.31, 2.31, 2.31, 2.31]
    ranks.stop()

The ranks are ipyparallel engines; added here are the process group, output in rank order, errors that
end the cell on every rank at once, and recovery. cell.py waits for a cell on all ranks, output.py shows
what they print; local_cluster.py tracks the processes, fork_server.py starts them, engine.py runs inside
them; remote_cluster.py starts them on other hosts.
"""

import argparse
import atexit
import contextlib
import os
import shlex
import sys
from collections.abc import Sequence
from typing import Any

from fsdp_utils.notebook.cell import Cell, RankError, ipython, ranks_died, regroup, someone_watches
from fsdp_utils.notebook.fork_server import LESSON_BATCH
from fsdp_utils.notebook.local_cluster import CallError, Cluster, LocalCluster
from fsdp_utils.notebook.remote_cluster import RemoteCluster

TIMEOUT_S = 60.0  # the longest that a collective may wait, unless the cell says otherwise
ANSWER_LIMIT_S = 2.0  # for what only adds to an error message
LONGEST_TIMEOUT_S = 1e6  # eleven days; torch's clocks overflow long after

_cluster: Cluster | None = None


def start(
    world_size: int | None = None,
    *,
    device: str | None = None,
    method: str | None = None,
    profile: str | None = None,
    preload: Sequence[str] = (),
) -> None:
    """Start the ranks, or keep them if they run already.

    Args:
        world_size: how many. Default: the environment's FSDP_RANKS, else one for each GPU where there
            are two or more, else 4. Of 5, 7 or 9 GPUs it leaves some unused, because the lessons' batches
            of 24 samples are shared equally.
        device: "cpu" (gloo) or "cuda" (nccl, one GPU for each rank). Default: "cuda" where there are two
            GPUs or more and enough for all ranks.
        method: "fork" from one process that has imported torch, the default where it exists, or "spawn".
        profile: start them on other hosts instead, through the launcher (SSH, Slurm, ...) that this IPython
            profile names: see remote_cluster.py. There a rank that dies is not replaced: all end, to be
            started again.
        preload: modules that are slow to import and that the notebook and its ranks both need. The process
            that forks the ranks imports them once for all of them, and meanwhile the notebook does, too. With
            "spawn" or a profile each rank still imports them itself.

    Raises:
        ImportError: one of `preload` cannot be imported.
        RuntimeError: not in a notebook; `fsdp_utils.run_on_ranks` is for scripts. Or the profile's launcher
            did not start the ranks.
        ValueError: a number of ranks below 1, or more ranks on CUDA than there are GPUs, or no such profile.

    Example::

        ranks.start(2)
    """
    global _cluster
    if ipython() is None:
        raise RuntimeError(
            "ranks.start() serves notebooks, and this is not one. In a script use "
            "fsdp_utils.run_on_ranks(function, world_size=4), or torchrun."
        )
    if world_size is None and os.environ.get("FSDP_RANKS"):
        try:
            world_size = int(os.environ["FSDP_RANKS"])
        except ValueError:
            found = os.environ["FSDP_RANKS"]
            raise ValueError(f"FSDP_RANKS should be a number of ranks, found {found!r}.") from None
    if world_size is not None and not 1 <= world_size < 1000:
        raise ValueError(f"ranks.start({world_size}): expected 1 to 999 ranks.")
    if device not in (None, "cpu", "cuda"):
        raise ValueError(f"ranks.start(device={device!r}): expected 'cpu' or 'cuda'.")
    if profile is not None and method is not None:
        raise ValueError(
            f"ranks.start(profile=..., method={method!r}): the profile's launcher starts the ranks."
        )
    if _cluster is not None and not _cluster.ended:
        same = world_size in (None, _cluster.world_size) and device in (None, _cluster.device)
        if same and profile == _cluster.settings.get("profile") and _alive(_cluster):
            print(f"{_cluster.world_size} ranks are running already; their variables are kept.")
            return
        stop()
    announced = "starting the ranks: importing torch ..." if someone_watches() else ""
    print(announced, end="", flush=True)
    try:
        if profile is not None:
            _cluster = RemoteCluster(world_size, device, profile)
        else:
            method = method or ("fork" if hasattr(os, "fork") else "spawn")
            _cluster = LocalCluster(world_size, device, method, preload)
    finally:  # the line is replaced by what comes next
        print("\r" + " " * len(announced) + "\r" if announced else "", end="", flush=True)
    backend = "nccl, one GPU each" if _cluster.device == "cuda" else "gloo on CPU"
    hosts = list(dict.fromkeys(_cluster.settings.get("hosts", [])))
    print(
        f"{_cluster.world_size} rank{'s' * (_cluster.world_size > 1)} in one process group ({backend})"
        + f", on {', '.join(hosts)}" * bool(hosts)
    )
    if unused := _cluster.settings.get("unused_gpus"):
        gpus = _cluster.world_size + unused
        print(
            f"{gpus} GPUs are here. The lessons' batches of {LESSON_BATCH} samples have no equal shares for "
            f"{gpus} ranks; ranks.start({gpus}) starts them all the same."
        )


def stop() -> None:
    """End all ranks; nothing happens where there are none.

    Example::

        ranks.stop()
    """
    global _cluster
    if _cluster is not None and not _cluster.ended:
        _cluster.end()
    _cluster = None


def get(expression: str) -> list[Any]:
    """The value of an expression on each rank.

    Args:
        expression: a variable's name, or any expression: `"loss.item()"`.

    Returns:
        A list by rank. Tensors come as CPU tensors; of a DTensor each rank gives its own shard.

    Raises:
        RankError: the expression fails on a rank, or its value cannot be pickled there or unpickled here.
        RuntimeError: there are no ranks.

    Example::

        losses = ranks.get("loss.item()")
        print(losses)  # [0.0, 1.0]
    """
    cluster = _running()
    try:
        return cluster.ask(range(cluster.world_size), "evaluate", expression)
    except CallError as error:
        raise RankError(f"ranks.get({expression!r}) raised {error}", "") from None


def _alive(cluster: Cluster) -> bool:
    try:
        return not cluster.ended_ranks()
    except RuntimeError:
        return False


def _running() -> Cluster:
    if _cluster is None or _cluster.ended:
        raise RuntimeError("There are no ranks yet. Call ranks.start() in a cell of its own first.")
    return _cluster


# --- a cell ------------------------------------------------------------------------------------------


def _magic(line: str, cell: str) -> None:
    """%%ranks [RANKS] [--timeout SECONDS]: run the cell on all ranks, or on some, as `%%ranks 1,3`."""
    cluster = _running()
    chosen, timeout_s = _arguments(line, cluster.world_size)
    dead = cluster.ended_ranks()
    if dead:
        note = regroup(cluster, dead)
        raise ranks_died(dead, "between two cells; this cell was not run", note)
    Cell(cluster, cell, chosen, timeout_s).run()


def _arguments(line: str, world_size: int) -> tuple[list[int], float]:
    parser = argparse.ArgumentParser("%%ranks", add_help=False, exit_on_error=False, allow_abbrev=False)
    parser.add_argument("ranks", nargs="?")
    parser.add_argument("--timeout", type=float, default=TIMEOUT_S)
    try:
        arguments = parser.parse_args(shlex.split(line.split("#")[0]))
        names = range(world_size) if arguments.ranks is None else arguments.ranks.split(",")
        chosen = sorted({int(name) for name in names})
        if not all(0 <= rank < world_size for rank in chosen):
            raise ValueError
        if not 0 < arguments.timeout <= LONGEST_TIMEOUT_S:  # false for nan, too
            raise ValueError
    except (argparse.ArgumentError, ValueError, SystemExit):
        raise ValueError(
            f"%%ranks {line.strip()}: expected ranks from 0 to {world_size - 1}, as in `%%ranks 0` or "
            "`%%ranks 0,1`, and nothing for all; `--timeout SECONDS`, above 0 and at most "
            f"{LONGEST_TIMEOUT_S:,.0f}, limits how long a collective may wait."
        ) from None
    return chosen, arguments.timeout


def _explain_missing_name(result: Any) -> None:
    """After an ordinary cell: say so if the name that the notebook does not know is known on the ranks."""
    error = result.error_in_exec
    if not isinstance(error, NameError) or not error.name or _cluster is None or _cluster.ended:
        return
    with contextlib.suppress(Exception):  # the ranks cannot answer now, and the error is shown already
        if any(_cluster.ask(range(_cluster.world_size), "has_name", error.name, limit_s=ANSWER_LIMIT_S)):
            print(
                f"{error.name} lives on the ranks: use it in a %%ranks cell, "
                f"or fetch it with ranks.get({error.name!r}).",
                file=sys.stderr,
            )


if ipython() is not None:
    ipython().events.register("post_run_cell", _explain_missing_name)
    ipython().register_magic_function(_magic, magic_kind="cell", magic_name="ranks")
    atexit.register(stop)
