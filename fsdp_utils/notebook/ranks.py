"""Real ranks in a notebook: cells under `%%ranks` run on every rank, as a script does under torchrun.

The ranks are processes of this machine, started as run_on_ranks starts its ranks; for several hosts use
torchrun with a lesson's script. cell.py waits for a cell on all ranks, output.py shows what they print;
cluster.py knows the processes; engine.py runs inside them, and group.py makes their process group.
"""

import atexit
import contextlib
import os
import re
import sys
from collections.abc import Sequence
from typing import Any

from fsdp_utils.notebook.cell import Cell, RankError, ipython, ranks_died, regroup
from fsdp_utils.notebook.cluster import TIMEOUT_S, CallError, Cluster, Interrupts

ANSWER_LIMIT_S = 2.0  # for what only adds to an error message

_cluster: Cluster | None = None


def start(
    world_size: int | None = None,
    *,
    device: str | None = None,
    preload: Sequence[str] = (),
) -> None:
    """Start the ranks, or keep them if they run already.

    Args:
        world_size: how many. Default: the environment's FSDP_RANKS, else one for each GPU where there are two
            or more, else 4. Of 5, 7 or 9 GPUs some stay unused: a lesson's batch of 24 is shared equally.
        device: "cpu" (gloo) or "cuda" (nccl, one GPU for each rank). Default: "cuda" where there are two
            GPUs or more and enough for all ranks.
        preload: slow modules that the notebook and its ranks both need, imported once for all ranks.

    Raises:
        ImportError: one of `preload` cannot be imported.
        RuntimeError: not in a notebook; `fsdp_utils.run_on_ranks` is for scripts.
        ValueError: a number of ranks below 1, or more ranks on CUDA than there are GPUs.

    Example::

        ranks.start(2)
    """
    global _cluster
    if ipython() is None:
        raise RuntimeError(
            "ranks.start() serves notebooks, and this is not one. In a script use "
            "fsdp_utils.run_on_ranks(function, world_size=4), or torchrun."
        )
    if world_size is None and (asked := os.environ.get("FSDP_RANKS")):
        if not asked.isdecimal():
            raise ValueError(f"FSDP_RANKS should be a number of ranks, found {asked!r}.")
        world_size = int(asked)
    if world_size is not None and not 1 <= world_size < 1000:
        raise ValueError(f"ranks.start({world_size}): expected 1 to 999 ranks.")
    if device not in (None, "cpu", "cuda"):
        raise ValueError(f"ranks.start(device={device!r}): expected 'cpu' or 'cuda'.")
    if _cluster is not None and not _cluster.ended:
        same = world_size in (None, _cluster.world_size) and device in (None, _cluster.device)
        _cluster.take_all_messages()
        if same and not _cluster.exits:
            print(f"{_cluster.world_size} ranks are running already; their variables are kept.")
            return
        stop()
    _cluster = Cluster(world_size, device, preload)
    backend = "nccl, one GPU each" if _cluster.device == "cuda" else "gloo on CPU"
    count = f"{_cluster.world_size} rank{'s' * (_cluster.world_size > 1)}"
    print(f"{count} in one process group ({backend})")


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
        with Interrupts() as interrupts:
            return cluster.ask(range(cluster.world_size), "evaluate", expression, interrupts=interrupts)
    except CallError as error:
        raise RankError(f"ranks.get({expression!r}) raised {error}", "") from None


def _running() -> Cluster:
    if _cluster is None or _cluster.ended:
        raise RuntimeError("There are no ranks yet. Call ranks.start() in a cell first.")
    return _cluster


# --- a cell ------------------------------------------------------------------------------------------


def _magic(line: str, cell: str) -> None:
    """%%ranks [RANKS] [--timeout SECONDS]: run the cell on all ranks, or on some, as `%%ranks 1,3`."""
    chosen, timeout_s = _arguments(line, _running().world_size)
    run(cell, chosen, timeout_s=timeout_s)


def run(
    cell: str, chosen: list[int] | None = None, *, timeout_s: float = TIMEOUT_S, stuck_s: float | None = None
) -> None:
    """Run a cell on all ranks or on some, as `%%ranks` does.

    Args:
        cell: source code.
        chosen: the ranks. Default: all.
        timeout_s: the longest that a collective may wait.
        stuck_s: end the cell where all ranks that still run it have waited so long, in different collectives
            or for a rank that has finished. Default: they wait until the time-out.

    Raises:
        RankError: the cell fails on a rank.

    Example::

        ranks.run("print(rank)", timeout_s=10)
    """
    cluster = _running()
    chosen = [*range(cluster.world_size)] if chosen is None else chosen
    with Interrupts() as interrupts:
        cluster.take_all_messages()
        if died := dict(cluster.exits):
            raise ranks_died(died, "between two cells; this cell was not run", regroup(cluster))
        Cell(cluster, cell, chosen, timeout_s, interrupts, stuck_s).run()


def _arguments(line: str, world_size: int) -> tuple[list[int], float]:
    given = line.partition("#")[0].strip()
    if found := re.fullmatch(r"(\d+(?:,\d+)*)?\s*(?:--timeout (\d{1,6}(?:\.\d+)?))?", given):
        names, seconds = found.groups()
        chosen = sorted({*map(int, names.split(","))}) if names else [*range(world_size)]
        timeout_s = TIMEOUT_S if seconds is None else float(seconds)
        if chosen[-1] < world_size and timeout_s > 0:
            return chosen, timeout_s
    raise ValueError(
        f"%%ranks {given}: expected ranks from 0 to {world_size - 1}, as in `%%ranks 0` or `%%ranks 0,1`, or "
        "nothing for all; then perhaps `--timeout SECONDS`, the longest that a collective may wait, above 0 "
        "and below 1,000,000."
    )


def _explain_missing_name(result: Any) -> None:
    """After an ordinary cell: say so if the name that the notebook does not know is known on the ranks."""
    error = result.error_in_exec
    if not isinstance(error, NameError) or not error.name or _cluster is None or _cluster.ended:
        return
    with contextlib.suppress(Exception), Interrupts():  # the error itself is shown already
        is_there = f"{error.name!r} in globals()"
        if any(_cluster.ask(range(_cluster.world_size), "evaluate", is_there, limit_s=ANSWER_LIMIT_S)):
            print(
                f"{error.name} lives on the ranks: use it in a %%ranks cell, "
                f"or fetch it with ranks.get({error.name!r}).",
                file=sys.stderr,
            )


if ipython() is not None:
    ipython().events.register("post_run_cell", _explain_missing_name)
    ipython().register_magic_function(_magic, magic_kind="cell", magic_name="ranks")
    atexit.register(stop)
