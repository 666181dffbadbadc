"""The code that runs inside a rank: join the process group, run a cell, leave a stuck collective."""

import contextlib
import ctypes
import os
import pickle
import platform
import signal
import socket
import stat
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import cloudpickle
import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from fsdp_utils.notebook import nccl, tracebacks
from fsdp_utils.notebook.nccl import gpu_is_lost as gpu_is_lost  # called by the notebook, as all below
from fsdp_utils.torch_internals.groups import abort_groups, process_groups, set_group_timeout
from fsdp_utils.torch_internals.runtime import hide_apple_gpu

GRACE_S = 0.5  # how long an interrupted cell may take to come back by itself before its group is cut
EPOLL_CTL_MOD, EPOLLET = 3, 1 << 31  # of Linux's <sys/epoll.h>
REPORT_EVERY_S = 1.0  # of a cell that takes longer, where it stands
AT_THE_END = "the end of the cell, where it waits for its GPU"

_listener: socket.socket | None = None  # rank 0: where the next group's store will listen
_older: set[int] = set()  # inodes of the sockets that were there before any group: not the group's
_cell_is_over = threading.Event()
_wakeup: tuple[socket.socket, socket.socket] | None = None


def open_store(address: str = "127.0.0.1") -> tuple[str, int]:
    """Open the port of the next group's store: in rank 0, or in what rank 0 is forked from."""
    global _listener
    _listener = socket.create_server((address, 0), backlog=1024)
    return _listener.getsockname()[:2]


def close_store() -> None:
    """In the process that forked rank 0: let go of the port."""
    global _listener
    if _listener is not None:
        _listener.close()
    _listener = None


def join_group(rank: int, settings: dict[str, Any]) -> None:
    """Join the process group of all ranks, in place of the one before.

    Args:
        rank: this process's rank.
        settings: `world_size`, `device` ("cpu" or "cuda"), `store` (host, port) and `timeout_s`, the
            longest that a collective may wait. Ranks on several hosts also need `hosts`, the name of each
            rank's host, and `interfaces`, over which each reaches the others.
    """
    world_size, (host, port) = settings["world_size"], settings["store"]
    hosts = settings.get("hosts") or ["this one"] * world_size
    interfaces = settings.get("interfaces") or ["lo0" if sys.platform == "darwin" else "lo"] * world_size
    local_rank, local_world_size = hosts[:rank].count(hosts[rank]), hosts.count(hosts[rank])
    os.environ.update(
        RANK=f"{rank}",
        LOCAL_RANK=f"{local_rank}",
        GROUP_RANK=f"{list(dict.fromkeys(hosts)).index(hosts[rank])}",
        WORLD_SIZE=f"{world_size}",
        LOCAL_WORLD_SIZE=f"{local_world_size}",
        MASTER_ADDR=host,
        MASTER_PORT=f"{port}",
        GLOO_SOCKET_IFNAME=interfaces[rank],
    )
    on_gpu = settings["device"] == "cuda"
    if on_gpu:
        nccl.configure(interfaces[rank])
        torch.cuda.set_device(local_rank)
    else:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # ranks on the CPU of a machine with a GPU: nothing picks it
        hide_apple_gpu()
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // local_world_size))
    with contextlib.suppress(Exception):  # whatever state the old group was left in, it goes
        _leave_groups() if on_gpu else dist.destroy_process_group()
    _quieten_old_sockets()
    timeout = timedelta(seconds=settings["timeout_s"])
    # cuDNN computes fp32 convolutions in TF32 by default, to three digits; lessons compare the losses of 24
    # and of 6 images to 1e-4
    torch.backends.cudnn.allow_tf32 = False
    # A TCPStore that opens its own port listens on every interface of the machine: give it ours.
    fd = (_listener or socket.create_server((host, port))).detach() if rank == 0 else None
    close_store()
    open_store = partial(
        TCPStore, host, port, world_size, rank == 0, timeout, wait_for_workers=False, master_listen_fd=fd
    )
    try:
        store = open_store()
    except NotImplementedError:  # torch 2.7's libuv takes no port that is open already
        store = open_store(use_libuv=False)
    backend = "cpu:gloo,cuda:nccl" if on_gpu else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
    if on_gpu:
        nccl.warm_up(settings["timeout_s"])


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

    Destroying a gloo group does not wake those who wait in it while a model still holds the group;
    shutting its sockets does, at once and on both sides. NCCL's kernels end when the group is aborted.
    Models sharded over the group are void then.
    """
    if torch.cuda.is_initialized():
        with contextlib.suppress(Exception):  # the sockets have to be shut in any case
            _leave_groups()
    for _, connection in _group_connections():
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

    A model that still exists keeps its group, and with it gloo's connections. Where a message of an
    abandoned collective has arrived and its buffer is gone, gloo's thread neither reads it nor closes the
    socket (`Pair::prepareRead` returns -1), and level-triggered epoll reports the socket again and again: a
    core at 100%. Edge-triggered epoll reports it once. The registration must stay, with gloo's pointer in it,
    because gloo ends the process if it cannot remove the registration later.
    """
    if sys.platform != "linux":
        return
    old = {fd for fd, _ in _group_connections()}
    epoll_ctl = ctypes.CDLL(None).epoll_ctl
    for info in Path("/proc/self/fdinfo").iterdir():
        with contextlib.suppress(OSError):  # closed meanwhile
            for line in info.read_text().splitlines():
                if line.startswith("tfd:"):  # "tfd: 12 events: 19 data: 7f00c0de ...", the last two in hex
                    _, fd, _, events, _, data, *_ = line.split()
                    if int(fd) in old:
                        changed = _EpollEvent(int(events, 16) | EPOLLET, int(data, 16))
                        epoll_ctl(int(info.name), EPOLL_CTL_MOD, int(fd), ctypes.byref(changed))


def _group_connections() -> Iterator[tuple[int, socket.socket]]:
    """The TCP connections of this process's groups and their stores: file descriptor, and a socket."""
    controller = _controller_ports()
    for fd in range(3, 4096):
        with contextlib.suppress(OSError):  # not open, or closed meanwhile
            state = os.fstat(fd)
            if not stat.S_ISSOCK(state.st_mode) or state.st_ino in _older:
                continue
            with socket.socket(fileno=os.dup(fd)) as connection:
                if connection.family not in (socket.AF_INET, socket.AF_INET6):
                    continue
                ports = {connection.getsockname()[1]}
                with contextlib.suppress(OSError):  # it is shut already
                    ports.add(connection.getpeername()[1])
                listens = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
                if not listens and not ports & controller:
                    yield fd, connection


def _controller_ports() -> set[int]:
    """The ports that join this rank to the notebook: the connections that must survive a cut."""
    from ipyparallel.engine.app import IPEngine

    ports: set[int] = set()
    if not IPEngine.initialized():  # the rank is starting
        return ports
    for value in IPEngine.instance().connection_info.values():
        ports.update(
            port for port in (value if isinstance(value, list) else [value]) if isinstance(port, int)
        )
    return ports


def describe_host() -> tuple[str, str, int]:
    """In an engine that a launcher has started: its host's name, its address there, its GPUs."""
    from ipyparallel.engine.app import IPEngine

    _older.update(os.fstat(fd).st_ino for fd, _ in _group_connections())
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a cell lets itself be interrupted, an idle engine does not
    connection = IPEngine.instance().connection_info["interface"]
    return socket.gethostname(), address_towards(connection.split("://")[1]), torch.cuda.device_count()


def address_towards(other: str) -> str:
    """Which of this host's addresses it would send from to reach another (asked of the routing table)."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((other, 9))  # UDP: nothing is sent
        return probe.getsockname()[0]


def interface_towards(other: str) -> str:
    """The name of the network interface that has this address."""
    import psutil

    own = address_towards(other)
    names = [
        name for name, all_of_it in psutil.net_if_addrs().items() if own in {a.address for a in all_of_it}
    ]
    return names[0]


def run_cell(source: str, timeout_s: float) -> dict[str, Any]:
    """Run a cell in this rank's namespace.

    Args:
        source: the cell, without its `%%ranks` line.
        timeout_s: the longest that a collective of this cell may wait.

    Returns:
        `{"ok": True}`, or what went wrong: see `tracebacks.describe`; `time` (since the epoch) and `seconds`
        (since the cell began).
    """
    shell = _shell()
    for group in process_groups():
        set_group_timeout(group, timeout_s)
    _watch_for_interrupts()
    _cell_is_over.clear()
    began = time.monotonic()
    previous = signal.signal(signal.SIGINT, nccl.stop_cell)
    if torch.cuda.is_initialized():
        threading.Thread(target=nccl.watch, args=(_cell_is_over,), daemon=True).start()
    threading.Thread(target=_report_position, args=(source,), daemon=True).start()
    at_the_end = False
    try:
        with _own_streams(shell):
            result = shell.run_cell(source, store_history=False)
        error = result.error_before_exec or result.error_in_exec
        if error is None and torch.cuda.is_initialized():
            at_the_end = True
            torch.cuda.synchronize()  # what fails on the GPU belongs to this cell, and not to the next
    except (Exception, KeyboardInterrupt) as raised:
        error = raised
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        _cell_is_over.set()
        signal.signal(signal.SIGINT, previous if callable(previous) else signal.SIG_IGN)
    if error is None:
        return {"ok": True}
    found = tracebacks.describe(error, source)
    if at_the_end:
        found |= {"where": AT_THE_END, "text": f"at {AT_THE_END}"}
    found["in_collective"] |= isinstance(error, nccl.CollectiveError)
    return {"ok": False, "time": time.time(), "seconds": time.monotonic() - began, **found}


@contextlib.contextmanager
def _own_streams(shell: Any) -> Iterator[None]:
    """Keep the rank's output, whatever the cell does to sys.stdout and sys.stderr; hide tracebacks."""
    streams, hook, publisher = (sys.stdout, sys.stderr), shell.displayhook, shell.display_pub
    hide: dict[str, Any] = dict.fromkeys(("showtraceback", "showsyntaxerror"), lambda *_, **__: None)

    def flush() -> None:
        for stream in streams:
            type(stream).flush(stream)

    def put_back() -> None:
        sys.stdout, sys.stderr = streams
        shell.displayhook, shell.display_pub = hook, publisher
        for stream in streams:
            for name in [*vars(stream)]:  # methods that the cell has replaced, but not ours
                if name != "close" and callable(getattr(type(stream), name, None)):
                    delattr(stream, name)

    def start_displayhook() -> None:
        put_back()  # the hook flushes what stands there
        type(hook).start_displayhook(hook)

    replaced = (
        (shell, hide),  # the error is shown once, by the notebook, and not by every rank
        (hook, {"start_displayhook": start_displayhook}),
        (publisher, {"_flush_streams": flush}),
        *((stream, {"close": flush}) for stream in streams),
    )
    for owner, functions in replaced:
        vars(owner).update(functions)
    try:
        yield
    finally:
        put_back()
        for owner, functions in replaced:
            for name in functions:
                vars(owner).pop(name, None)
        flush()


def _report_position(source: str) -> None:
    """In a thread beside the cell: tell the notebook now and then where the cell stands on this rank.

    A rank waits in a collective if the main thread is in the same place for a while and uses no CPU there.
    """
    main = threading.main_thread().ident
    assert main is not None
    before, since = None, time.monotonic()
    while not _cell_is_over.wait(REPORT_EVERY_S):
        with contextlib.suppress(Exception):  # to report is not worth a failed cell
            place = tracebacks.position(sys._current_frames()[main], source)
            now = place, _cpu_time_ms(main)
            if now != before:
                before, since = now, time.monotonic()
            _shell().data_pub.publish_data({"position": {**place, "seconds": time.monotonic() - since}})


def _cpu_time_ms(thread: int) -> int:
    """CPU time of a thread in milliseconds; 0 where the system does not tell."""
    if not hasattr(time, "pthread_getcpuclockid"):
        return 0
    return round(time.clock_gettime(time.pthread_getcpuclockid(thread)) * 1000)


def has_name(name: str) -> bool:
    """Whether this rank's namespace has such a variable."""
    return name in _shell().user_ns


def evaluate(expression: str) -> Any:
    """The value of an expression in this rank's namespace, in a form that can travel."""
    return _portable(eval(expression, _shell().user_ns))


def answer(function: str, *args: Any) -> dict[str, Any]:
    """Call a function of this module for the notebook.

    ipyparallel's own way fails silently: its thread in the notebook dies of a result that cannot be
    unpickled there, and no later result arrives. So the result travels as bytes, which `result_of` unpickles.

    Returns:
        `{"value": bytes}`, or `{"name": str, "message": str}` of what the function raised.
    """
    try:
        return {"value": cloudpickle.dumps(globals()[function](*args), protocol=pickle.DEFAULT_PROTOCOL)}
    except BaseException as error:  # an expression of the reader's may raise SystemExit as well
        return {"name": type(error).__name__, "message": tracebacks.text_of(error)}


def _portable(value: Any) -> Any:
    """Tensors on the CPU, of a DTensor this rank's shard; containers of them alike."""
    if isinstance(value, torch.Tensor):
        if hasattr(value, "to_local"):
            value = value.to_local()  # pyright: ignore[reportAttributeAccessIssue] - a DTensor
        return value.detach().cpu().clone()
    if isinstance(value, dict):
        return {key: _portable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
        return type(value)(_portable(item) for item in value)
    return value


def _shell() -> Any:
    from IPython.core.getipython import get_ipython

    return get_ipython()


def _watch_for_interrupts() -> None:
    """Free this rank when it is interrupted while it waits in a collective.

    Python runs signal handlers between its own instructions, and a collective is one long call into
    C++. The interpreter's wake-up socket is written by the signal itself: a thread that reads it can
    cut the group from outside, and the collective comes back with an error.
    """
    global _wakeup
    if _wakeup is None:
        _wakeup = socket.socketpair()
        _wakeup[1].setblocking(False)
        threading.Thread(target=_cut_when_interrupted, args=(_wakeup[0],), daemon=True).start()
    signal.set_wakeup_fd(_wakeup[1].fileno(), warn_on_full_buffer=False)


def _cut_when_interrupted(wakeups: socket.socket) -> None:
    while True:
        if signal.SIGINT in wakeups.recv(1024) and not _cell_is_over.wait(GRACE_S):
            shut_connections()
