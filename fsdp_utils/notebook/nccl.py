"""Keep a notebook's rank alive when an NCCL collective fails: settings, warm-up, health check, time limit.

An NCCL collective runs on the GPU. Nothing raises in Python when the other ranks stay away: torch's
watchdog thread notices after the time limit and ends the process with SIGABRT, and all variables with it.
Here the watchdog only notices; the rank interrupts its own cell and aborts the communicator.
"""

import os
import signal
import threading
import time

import torch
import torch.distributed as dist

from fsdp_utils.torch_internals.groups import group_backend, process_groups

# Read by ProcessGroupNCCL when a group is made; what each means stands in torch's ProcessGroupNCCL.hpp.
WATCHDOG = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",  # NoHandling: note a time-out or an error, end no process
    "TORCH_NCCL_BLOCKING_WAIT": "0",  # with 1 there is no watchdog, and asynchronous waits block
    "TORCH_NCCL_DESYNC_DEBUG": "0",  # with 1 the error handling above is switched on again
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",  # a failed kernel raises in the cell instead of ending the process
    "TORCH_NCCL_ENABLE_MONITORING": "0",  # a watchdog that is stuck in a CUDA call ends no process either
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",  # no file of the flight recorder, no signal through the store
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "100",  # the watchdog sleeps four times as long after a time-out
}
DEVICE = torch.device("cuda")
POLL_S = 0.05

stoppable = False  # whether a cell runs, which SIGINT then stops
_stopped_because: str | None = None  # why the rank has interrupted its cell itself


class CollectiveError(RuntimeError):
    """A collective on the GPUs failed, or waited too long for the other ranks."""


def configure(interface: str) -> None:
    """Set NCCL's environment variables, with the network interface to use, before the group is made."""
    os.environ.update(WATCHDOG)
    os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")  # = for this name, not all that begin so


def warm_up(limit_s: float) -> None:
    """Run the first all-reduce, which makes the communicator, so that no cell has to wait for that."""
    if not sum_is_right(limit_s):
        raise CollectiveError(
            f"the first all-reduce on the GPUs did not end, or gave a wrong sum, within {limit_s:g} s. "
            "To read what NCCL says, set NCCL_DEBUG=INFO and start any script with torchrun here."
        )


def sum_is_right(limit_s: float) -> bool:
    """Whether an all-reduce over all ranks' GPUs ends within the limit, with the right sum.

    It is polled, as waiting for it would only make the GPU wait. A rank that is ahead adds to something else.
    """
    number = torch.tensor(1000.0 + dist.get_rank(), device=DEVICE)
    work = dist.all_reduce(number, async_op=True)
    assert work is not None
    end = time.monotonic() + limit_s
    while not work.is_completed():
        if time.monotonic() > end:
            return False
        time.sleep(0.001)
    work.wait()  # raises if it failed
    return number.item() == sum(1000.0 + rank for rank in range(dist.get_world_size()))


def failure() -> str | None:
    """Say what torch's watchdog has noticed in any group of this process; None if all is well."""
    for group in process_groups():
        try:
            backend = group_backend(group, DEVICE)
        except RuntimeError:  # a group of CPU tensors alone
            continue
        get_error = getattr(backend, "get_error", None)  # gloo has none
        found = "SUCCESS" if get_error is None else get_error().name
        if found == "TIMEOUT":
            return "a collective waited for the other ranks until its time limit"
        if found != "SUCCESS":
            return f"NCCL reports {found}: the connection to another rank broke, or a kernel failed"
    return None


def watch(cell_is_over: threading.Event) -> None:
    """Interrupt this rank's cell when one of its collectives has failed; runs in a thread beside it."""
    global _stopped_because
    while not cell_is_over.wait(POLL_S):
        if (found := failure()) is not None:
            _stopped_because = found
            os.kill(os.getpid(), signal.SIGINT)
            return


def stop_cell(*_: object) -> None:
    """Handle SIGINT: if a cell runs, stop it, once; with a CollectiveError if `watch` has sent the signal."""
    global stoppable, _stopped_because
    found, _stopped_because = _stopped_because, None
    if stoppable:
        stoppable = False
        raise KeyboardInterrupt if found is None else CollectiveError(found)


def gpu_is_lost(limit_s: float = 2.0) -> bool:
    """Whether an error, such as a device-side assert, has ended the CUDA context, and all calls fail."""
    if not torch.cuda.is_initialized():
        return False
    # Asked twice, because reporting an error clears it, unless the context is lost.
    return not _gpu_answers(limit_s) and not _gpu_answers(limit_s)


def _gpu_answers(limit_s: float) -> bool:
    """Wait for the GPU, but no longer than this, as a kernel may be stuck; false if it reports an error."""
    end = time.monotonic() + limit_s
    try:
        while not torch.cuda.current_stream().query() and time.monotonic() < end:
            time.sleep(0.001)
    except RuntimeError:
        return False
    return True
