"""The code that runs inside a rank: answer the notebook's calls, run cells and send what they display."""

import contextlib
import json
import os
import pickle
import queue
import signal
import socket
import sys
import threading
import time
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import cloudpickle
import torch
from IPython.core.displayhook import DisplayHook
from IPython.core.displaypub import DisplayPublisher
from IPython.core.interactiveshell import InteractiveShell
from torch.utils._pytree import tree_map_only
from traitlets import Type
from traitlets.config import Config

from fsdp_utils.distributed.rank_errors import text_of
from fsdp_utils.notebook import nccl, tracebacks
from fsdp_utils.notebook.group import group_is_healthy, join_group, shut_connections
from fsdp_utils.torch_internals.groups import process_groups, set_group_timeout

GRACE_S = 0.5  # how long an interrupted cell may take to come back by itself before its group is cut
REPORT_EVERY_S = 0.2  # tell where a cell that takes longer stands
AT_THE_END = "the end of the cell, where it waits for its GPU"

_cell_is_over = threading.Event()
_wakeup: socket.socket | None = None


# --- the connection to the notebook ---------------------------------------------------------------------


_call = 0  # the number of the call that is being answered
_messages: queue.SimpleQueue[tuple[int, str, Any]] = queue.SimpleQueue()


def _tell(what: str, value: Any) -> None:
    _messages.put((_call, what, value))


def _send_messages(pipe: Connection) -> None:
    """Send what is told, in a thread: an interrupt of the cell must not cut a message off."""
    with contextlib.suppress(OSError):  # the notebook has gone
        while True:
            pipe.send(_messages.get())


def _display(data: dict[str, Any], metadata: dict[str, Any] | None) -> None:
    def plain(value: Any) -> Any:  # a subclass may not unpickle there
        return bytes(value) if isinstance(value, bytes) else json.loads(json.dumps(value, default=str))

    _tell("display", {"data": {mime: plain(data[mime]) for mime in data}, "metadata": plain(metadata)})


def serve(rank: int, pipe: Connection, _: Path) -> None:
    """Be a rank of a notebook: answer its calls until it is gone."""
    global _call
    # by line: what a subprocess prints comes in order, and a killed rank has shown its lines
    written: dict[str, Any] = {"mode": "w", "buffering": 1, "encoding": "utf-8", "errors": "replace"}
    sys.stdout, sys.stderr = (os.fdopen(number, closefd=False, **written) for number in (1, 2))
    signal.signal(signal.SIGINT, nccl.stop_cell)  # which stops a cell and not an idle rank
    os.environ.setdefault("MPLBACKEND", "module://matplotlib_inline.backend_inline")
    shell = _Shell.instance(config=Config(HistoryManager={"enabled": False}))
    threading.Thread(target=_send_messages, args=(pipe,), daemon=True).start()
    functions = {
        "count_gpus": torch.cuda.device_count,
        "join_group": lambda *settings: join_group(rank, *settings),
        "group_is_healthy": group_is_healthy,
        "shut_connections": shut_connections,
        "gpu_is_lost": nccl.gpu_is_lost,
        "run_cell": run_cell,
        "evaluate": lambda expression: tree_map_only(
            torch.Tensor, _portable, eval(expression, shell.user_ns)
        ),
    }
    with contextlib.suppress(EOFError):
        while True:
            _call, function, args = pipe.recv()
            try:
                answer = cloudpickle.dumps(functions[function](*args), pickle.DEFAULT_PROTOCOL)
            except BaseException as error:  # an expression of the reader's may raise SystemExit as well
                answer = tracebacks.Failure(type(error).__name__, text_of(error))
            _tell("answer", answer)


def _portable(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor on the CPU, of a DTensor this rank's shard."""
    part: Any = tensor
    return (part.to_local() if hasattr(part, "to_local") else part).detach().cpu().clone()


# --- the shell ------------------------------------------------------------------------------------------


class _Values(DisplayHook):
    """Sends the value of a cell's last expression to the notebook."""

    def __call__(self, result: Any = None) -> None:
        self.check_for_underscore()
        if result is not None and not self.quiet():
            data, metadata = self.compute_format_data(result)
            self.update_user_ns(result)
            _display(data, metadata)


class _Displays(DisplayPublisher):
    """Sends what a cell displays to the notebook."""

    def publish(self, data: dict[str, Any], metadata: Any = None, *_: Any, **__: Any) -> None:
        _display(data, metadata)

    def clear_output(self, wait: bool = False) -> None:
        pass


class _Shell(InteractiveShell):
    displayhook_class = Type(_Values)
    display_pub_class = Type(_Displays)

    def showtraceback(self, *_: Any, **__: Any) -> None:
        """Show nothing: the error is shown once, by the notebook, and not by every rank."""

    showsyntaxerror = showtraceback


# --- a cell ---------------------------------------------------------------------------------------------


def run_cell(source: str, timeout_s: float) -> tracebacks.Failure | None:
    """Run a cell in this rank's namespace, with a limit for its collectives; returns what went wrong."""
    shell = InteractiveShell.instance()
    for group in process_groups():
        set_group_timeout(group, timeout_s)
    _watch_for_interrupts()
    _cell_is_over.clear()
    began = time.monotonic()
    if torch.cuda.is_initialized():
        threading.Thread(target=nccl.watch, args=(_cell_is_over,), daemon=True).start()
    threading.Thread(target=_report_position, args=(source,), daemon=True).start()
    at_the_end = False
    try:
        signal.signal(signal.SIGINT, nccl.stop_cell)  # a cell may have set another
        nccl.stoppable = True
        result = shell.run_cell(source, store_history=False)
        error = result.error_before_exec or result.error_in_exec
        if error is None and torch.cuda.is_initialized():
            at_the_end = True
            torch.cuda.synchronize()  # what fails on the GPU belongs to this cell, and not to the next
    except (Exception, KeyboardInterrupt) as raised:
        error = raised
    finally:
        nccl.stoppable = False
        _cell_is_over.set()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # whatever the cell has put there
            stream.flush()
    if error is None:
        return None
    found = tracebacks.describe(error, source)
    found.seconds = time.monotonic() - began
    if at_the_end:
        found.where, found.text = AT_THE_END, f"at {AT_THE_END}"
    found.in_collective |= isinstance(error, nccl.CollectiveError)
    return found


def _report_position(source: str) -> None:
    """In a thread beside the cell: tell the notebook now and then where the cell stands on this rank.

    A rank waits in a collective if the main thread is in the same place for a while and uses no CPU there.
    """
    main = threading.main_thread().ident
    assert main is not None
    before, since = None, time.monotonic()
    while not _cell_is_over.wait(REPORT_EVERY_S):
        with contextlib.suppress(Exception):  # to report is not worth a failed cell
            place = tracebacks.position(main, source)
            now = place, _cpu_time_ms(main)
            if now != before:
                before, since = now, time.monotonic()
            seconds = time.monotonic() - since
            _tell("position", replace(place, seconds=seconds, runnable=_others_runnable()))


def _cpu_time_ms(thread: int) -> int:
    """CPU time of a thread in milliseconds; 0 where the system does not tell."""
    if not hasattr(time, "pthread_getcpuclockid"):
        return 0
    return round(time.clock_gettime(time.pthread_getcpuclockid(thread)) * 1000)


def _others_runnable() -> bool:
    """Does another thread of this process run, or wait for a core? False where the system does not tell.

    On a busy machine a rank that seems to wait in a collective may only wait for a core.
    """
    own = str(threading.get_native_id())
    for thread in Path("/proc/self/task").glob("*"):
        with contextlib.suppress(OSError):  # it has ended
            if thread.name != own and (thread / "stat").read_text().rpartition(") ")[2].startswith("R"):
                return True
    return False


def _watch_for_interrupts() -> None:
    """Free this rank when it is interrupted while it waits in a collective.

    Python runs signal handlers between its own instructions, and a collective is one long call into
    C++. The interpreter's wake-up socket is written by the signal itself: a thread that reads it can
    cut the group from outside, and the collective comes back with an error.
    """
    global _wakeup
    if _wakeup is None:
        wakeups, _wakeup = socket.socketpair()
        _wakeup.setblocking(False)
        threading.Thread(target=_cut_when_interrupted, args=(wakeups,), daemon=True).start()
    signal.set_wakeup_fd(_wakeup.fileno(), warn_on_full_buffer=False)  # asyncio takes it away


def _cut_when_interrupted(wakeups: socket.socket) -> None:
    while True:
        if signal.SIGINT in wakeups.recv(1024) and not _cell_is_over.wait(GRACE_S):
            shut_connections()
