"""The rank's side of a start: set up the process as torchrun would; for `run_on_ranks`, call the function."""

import faulthandler
import io
import os
import sys
import time
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import cloudpickle
import torch
import torch.distributed as dist

from fsdp_utils.distributed import rank_errors
from fsdp_utils.distributed.agreement import usable_cores
from fsdp_utils.distributed.rank_errors import pack_error
from fsdp_utils.torch_internals.runtime import hide_apple_gpu

START_LIMIT_S = 120.0  # for all ranks to have a process group; the first call imports torch in the server


def set_up(rank: int, world_size: int, *, gpu: bool = False) -> None:
    """Set the environment and the threads of a rank of this machine, before it makes its process group.

    Args:
        rank: this process's rank.
        world_size: number of ranks, which share the cores.
        gpu: whether it uses GPUs. If not, nothing on a rank may choose one, as a bare fully_shard would.
    """
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        GROUP_RANK="0",
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
        # gloo takes its interface from here, and would otherwise listen on another.
        GLOO_SOCKET_IFNAME="lo" if sys.platform == "linux" else "lo0",
    )
    if not gpu:
        # HIP (ROCm) takes an empty list for none given.
        os.environ.update(CUDA_VISIBLE_DEVICES="", HIP_VISIBLE_DEVICES="-1")
        hide_apple_gpu()
    limit = os.environ.get("OMP_NUM_THREADS", "")
    threads = usable_cores() // world_size
    torch.set_num_threads(max(1, min(threads, int(limit)) if limit.isdecimal() else threads))


def call_function(
    rank: int, pipe: Connection, directory: Path, world_size: int, call: bytes, timeout: float
) -> None:
    """Join the process group, call the function, and send what it returns, or its failure."""
    rank_errors.finding = directory / "finding"
    for name in [name for name in os.environ if name.startswith(("TORCHELASTIC_", "MASTER_"))]:
        del os.environ[name]
    try:
        set_up(rank, world_size)
        if isinstance(sys.stdout, io.TextIOWrapper):
            # A killed rank has still shown its prints; a line arrives whole, under PYTHONUNBUFFERED too.
            sys.stdout.reconfigure(line_buffering=True, write_through=False)
        dist.init_process_group(
            "gloo",
            init_method=f"file://{directory.as_posix()}/store",  # a file: no port that others could reach
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout + START_LIMIT_S),  # the caller's timeout is to come first
        )
        pipe.send(("ready", None))
        pipe.recv()
        faulthandler.dump_traceback_later(timeout, file=stack_file(directory, rank).open("w"))
        fn, args = cloudpickle.loads(call)
        message = "result", _dumps(fn(*args))
    except BaseException as error:
        message = "failure", (time.monotonic_ns(), pack_error(error))
    faulthandler.cancel_dump_traceback_later()
    try:
        pipe.send(message)
        # Stay until everybody is done: were the group to close now, peers would fail in their collectives,
        # and the caller would have to tell their failures from the first. After a failure SIGKILL ends this.
        pipe.recv()
    except (EOFError, OSError):  # the caller has gone, or fn has closed descriptors that it had not opened
        os._exit(1)
    if dist.is_initialized():
        dist.destroy_process_group()


def stack_file(directory: Path, rank: int) -> Path:
    """Where the faulthandler of a rank writes on timeout."""
    return directory / f"stack_{rank}"


def _dumps(result: Any) -> bytes:
    try:
        return cloudpickle.dumps(result)
    except Exception as error:
        raise TypeError(f"what fn returned cannot be sent to the caller: {error}") from error
