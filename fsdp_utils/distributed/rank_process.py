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
from pathlib import Path
from typing import Any, NamedTuple

import cloudpickle
import torch
import torch.distributed as dist

from fsdp_utils.distributed.rank_errors import pack_error
from fsdp_utils.distributed.rank_supervisor import supervise_rank
from fsdp_utils.torch_internals.runtime import hide_apple_gpu

if sys.platform != "win32":  # where ranks are spawned, which inherit the caller's own output
    from multiprocessing.reduction import DupFd

START_LIMIT_S = 120.0  # for all ranks to have a process group; the first call imports torch in the server
EXIT_CUT_OFF = 74  # EX_IOERR of sysexits.h: this process can no longer reach its caller


class Job(NamedTuple):
    """What each rank is told."""

    world_size: int
    device: str
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
        self._received = received

    def __reduce__(self) -> tuple[Any, ...]:
        return CallersOutput, ({number: DupFd(number) for number in (1, 2) if _is_open(number)},)

    def take(self) -> None:
        """From here on, write to where the caller does."""
        for number, received in (self._received or {}).items():
            descriptor = received.detach()
            os.dup2(descriptor, number)
            os.close(descriptor)


def _is_open(number: int) -> bool:
    with suppress(OSError):
        os.fstat(number)
        return True
    return False


def rank_main(
    rank: int, job: Job, pipe: Connection, control: Connection, output: CallersOutput | None
) -> None:
    supervise_rank(control, pipe, job.directory)
    if output is not None:
        output.take()
    if not job.directory.exists():  # the call was interrupted while this rank was being started
        return
    try:
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
            # Stay until everybody is done: were the group to close now, peers would fail in their
            # collectives, and the caller would have to tell their failures from the first. After a failure
            # SIGKILL ends this.
            pipe.recv()
        if dist.is_initialized():
            dist.destroy_process_group()
    except (EOFError, OSError):  # fn has closed descriptors that it had not opened; the caller tells it
        os._exit(EXIT_CUT_OFF)


def _be_rank(rank: int, job: Job) -> None:
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
    # gloo and NCCL take their interface from here, and would otherwise listen on others.
    if loopback := {"linux": "lo", "darwin": "lo0"}.get(sys.platform):
        os.environ.update(GLOO_SOCKET_IFNAME=loopback, NCCL_SOCKET_IFNAME=f"={loopback}")
    if job.device == "cpu":
        # Nothing on a rank of the CPU may choose the GPU, as a bare fully_shard would. HIP (ROCm) takes an
        # empty list for none given.
        os.environ.update(CUDA_VISIBLE_DEVICES="", HIP_VISIBLE_DEVICES="-1")
        hide_apple_gpu()
    else:
        torch.cuda.set_device(rank)
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A rank that is killed has still shown its prints; a line arrives whole, under PYTHONUNBUFFERED too.
        sys.stdout.reconfigure(line_buffering=True, write_through=False)
    torch.set_num_threads(_threads(job.world_size))
    dist.init_process_group(
        "gloo" if job.device == "cpu" else "cpu:gloo,cuda:nccl",
        # A file: no port to find, and none that others could reach.
        init_method=f"file://{(job.directory / 'store').as_posix()}",
        rank=rank,
        world_size=job.world_size,
        timeout=timedelta(seconds=job.timeout + START_LIMIT_S),  # the caller's timeout is to come first
    )


def _threads(world_size: int) -> int:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    limit = os.environ.get("OMP_NUM_THREADS", "")
    return min(max(1, cores // world_size), max(1, int(limit)) if limit.isdecimal() else cores)


def _dumps(result: Any) -> bytes:
    try:
        return cloudpickle.dumps(result)
    except Exception as error:
        raise TypeError(f"what fn returned cannot be sent to the caller: {error}") from error
