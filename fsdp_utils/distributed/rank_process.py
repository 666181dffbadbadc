"""The process of a rank of `run_on_ranks`: joins the process group, calls the function, sends its result."""

import faulthandler
import io
import multiprocessing
import os
import sys
import time
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import Any, NamedTuple

import cloudpickle
import torch
import torch.distributed as dist

from fsdp_utils.distributed import rank_errors
from fsdp_utils.distributed.rank_errors import pack_error
from fsdp_utils.distributed.rank_supervisor import supervise_rank
from fsdp_utils.torch_internals.runtime import hide_apple_gpu

START_LIMIT_S = 120.0  # for all ranks to have a process group; the first call imports torch in the server


class Job(NamedTuple):
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


class CallersOutput:
    """The caller's standard output and standard error: pickled by the caller, unpickled on the rank.

    A forked rank would write to where the fork server's output went when the server was started; the
    caller may have redirected its own since (pytest's capfd does).
    """

    def __init__(self, received: dict[int, Any] | None = None) -> None:
        self._received = received or {}

    def __reduce__(self) -> tuple[Any, ...]:
        sent = {}
        for number in (1, 2):
            with suppress(OSError):  # the caller has closed it
                os.fstat(number)
                sent[number] = DupFd(number)
        return CallersOutput, (sent,)

    def take(self) -> None:
        """From here on, write to where the caller does."""
        for number, received in self._received.items():
            descriptor = received.detach()
            os.dup2(descriptor, number)
            os.close(descriptor)


def rank_main(
    rank: int, job: Job, pipe: Connection, control: Connection, output: CallersOutput | None
) -> None:
    supervise_rank(control, pipe, job.directory)
    if output is not None:  # a spawned rank has it by itself
        output.take()
    if not job.directory.exists():  # the call was interrupted while this rank was being started
        return
    rank_errors.finding = job.directory / "finding"
    stack_file = job.stack_of(rank).open("w")
    try:
        _join(rank, job)
        pipe.send(("ready", None))
        pipe.recv()
        faulthandler.dump_traceback_later(job.timeout, file=stack_file)
        fn, args = cloudpickle.loads(job.call)
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


def _join(rank: int, job: Job) -> None:
    """Set up the process as torchrun and a training script would, and make the process group."""
    multiprocessing.set_start_method(job.start_method, force=True)  # as in the caller, for DataLoader workers
    os.environ.clear()
    os.environ.update(
        job.environ,
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        GROUP_RANK="0",
        WORLD_SIZE=str(job.world_size),
        LOCAL_WORLD_SIZE=str(job.world_size),
    )
    # gloo takes its interface from here, and would otherwise listen on another.
    os.environ.update(GLOO_SOCKET_IFNAME="lo" if sys.platform == "linux" else "lo0")
    # Nothing on a rank may choose the GPU, as a bare fully_shard would. HIP (ROCm) takes an empty list for
    # none given.
    os.environ.update(CUDA_VISIBLE_DEVICES="", HIP_VISIBLE_DEVICES="-1")
    hide_apple_gpu()
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A rank that is killed has still shown its prints; a line arrives whole, under PYTHONUNBUFFERED too.
        sys.stdout.reconfigure(line_buffering=True, write_through=False)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    limit = os.environ.get("OMP_NUM_THREADS", "")
    torch.set_num_threads(max(1, min(cores // job.world_size, int(limit) if limit.isdecimal() else cores)))
    dist.init_process_group(
        "gloo",
        # A file: no port to find, and none that others could reach.
        init_method=f"file://{(job.directory / 'store').as_posix()}",
        rank=rank,
        world_size=job.world_size,
        timeout=timedelta(seconds=job.timeout + START_LIMIT_S),  # the caller's timeout is to come first
    )


def _dumps(result: Any) -> bytes:
    try:
        return cloudpickle.dumps(result)
    except Exception as error:
        raise TypeError(f"what fn returned cannot be sent to the caller: {error}") from error
