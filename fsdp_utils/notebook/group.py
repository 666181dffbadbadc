"""A rank's process group: join it, see whether it is whole, leave a stuck collective."""

import contextlib
import ctypes
import os
import platform
import socket
import stat
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from fsdp_utils.distributed.launch import set_up
from fsdp_utils.notebook import nccl
from fsdp_utils.torch_internals.groups import abort_groups

EPOLL_CTL_MOD, EPOLLET = 3, 1 << 31  # from Linux's <sys/epoll.h>


def join_group(rank: int, world_size: int, device: str, store: Path, timeout_s: float) -> int:
    """Join the process group of all ranks, in place of the one before; returns this process's id.

    The group's store is a new file: no port that others could reach. A collective may wait for timeout_s.
    """
    on_gpu = device == "cuda"
    set_up(rank, world_size, gpu=on_gpu)
    if on_gpu:
        nccl.configure(os.environ["GLOO_SOCKET_IFNAME"])
        torch.cuda.set_device(rank)
    with contextlib.suppress(Exception):  # whatever state the old group was left in, it goes
        _leave_groups() if on_gpu else dist.destroy_process_group()
    _quieten_old_sockets()
    # cuDNN computes fp32 convolutions in TF32 by default, to three digits; lessons compare the losses of 24
    # and of 6 images to 1e-4
    torch.backends.cudnn.allow_tf32 = False
    backend = "cpu:gloo,cuda:nccl" if on_gpu else "gloo"
    limit = timedelta(seconds=timeout_s)
    dist.init_process_group(backend, f"file://{store.as_posix()}", limit, world_size, rank)
    if on_gpu:
        nccl.warm_up(timeout_s)
    return os.getpid()


def group_is_healthy(limit_s: float = 2.0) -> bool:
    """Whether all ranks agree on the next collective: run one, and on GPUs another one there."""
    if not dist.is_initialized():
        return False
    try:
        work = dist.barrier(async_op=True)  # over gloo, if there is gloo
        whole = bool(work is None or work.wait(timedelta(seconds=limit_s)))
        if whole and torch.cuda.is_initialized():
            whole = nccl.failure() is None and nccl.sum_is_right(limit_s)
    except RuntimeError:
        whole = False
    if not whole:
        shut_connections()  # there will be a new one: let nobody wait for this rank until the limit
    return whole


def shut_connections() -> None:
    """Shut the connections to the other ranks, so that nobody stays in a collective.

    Destroying a gloo group wakes nobody while a model still holds it; shutting its sockets does, on both
    sides. NCCL's kernels end when the group is aborted. Models sharded over the group are void then.
    """
    if torch.cuda.is_initialized():
        with contextlib.suppress(Exception):  # the sockets have to be shut in any case
            _leave_groups()
    for _, connection in _connections():
        with contextlib.suppress(OSError):  # it is shut already
            connection.shutdown(socket.SHUT_RDWR)


def _leave_groups() -> None:
    """End all groups at once: destroy_process_group waits for kernels, and they for a rank that has died."""
    if dist.is_initialized():
        abort_groups()


class _EpollEvent(ctypes.Structure):
    """epoll_event of <sys/epoll.h>, which x86-64 packs."""

    _pack_ = 1 if platform.machine() == "x86_64" else 0
    _fields_ = (("events", ctypes.c_uint32), ("data", ctypes.c_uint64))


def _quieten_old_sockets() -> None:
    """Let gloo's thread sleep on the connections of the groups before.

    A model that still exists keeps its group's connections. Where a message of an abandoned collective has
    arrived, gloo's thread neither reads it nor closes the socket (`Pair::prepareRead` returns -1), and
    level-triggered epoll reports it again and again: a core at 100%. Edge-triggered epoll reports it once.
    The registration must stay: gloo ends the process if it cannot remove it later.
    """
    if sys.platform != "linux":
        return
    old = {fd for fd, _ in _connections()}
    epoll_ctl = ctypes.CDLL(None).epoll_ctl
    for info in Path("/proc/self/fdinfo").iterdir():
        with contextlib.suppress(OSError):  # closed meanwhile
            for line in info.read_text().splitlines():
                if line.startswith("tfd:"):  # "tfd: 12 events: 19 data: 7f00c0de ...", the last two in hex
                    _, fd, _, events, _, data, *_ = line.split()
                    if int(fd) in old:
                        changed = _EpollEvent(int(events, 16) | EPOLLET, int(data, 16))
                        epoll_ctl(int(info.name), EPOLL_CTL_MOD, int(fd), ctypes.byref(changed))


def _connections() -> Iterator[tuple[int, socket.socket]]:
    """The TCP connections of this process, which its groups and their stores have made."""
    for fd in range(3, 4096):
        with contextlib.suppress(OSError):  # not open, or closed meanwhile
            if not stat.S_ISSOCK(os.fstat(fd).st_mode):
                continue
            with socket.socket(fileno=os.dup(fd)) as connection:
                listens = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
                if connection.family in (socket.AF_INET, socket.AF_INET6) and not listens:
                    yield fd, connection
