"""Intercept the collectives that this process issues, from Python or from C++.

torch's CommDebugMode counts calls, without their bytes, groups and moments, and slows every operation.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.library import Library

# By operations of the dispatcher, which all calls reach: of ProcessGroup, of DDP from C++, of DTensor.
OPERATIONS = {
    "all_gather": (
        "allgather_",
        "_allgather_base_",
        "allgather_coalesced_",
        "allgather_into_tensor_coalesced_",
    ),
    "reduce_scatter": ("reduce_scatter_", "_reduce_scatter_base_", "reduce_scatter_tensor_coalesced_"),
    "all_reduce": ("allreduce_", "allreduce_coalesced_"),
    "broadcast": ("broadcast_",),
    "reduce": ("reduce_",),
    "gather": ("gather_",),
    "scatter": ("scatter_",),
    "all_to_all": ("alltoall_", "alltoall_base_"),
    "send": ("send",),
    "recv": ("recv_", "recv_any_source_"),
    "barrier": ("barrier",),
}
# The dispatch key after autograd's and before those of the backends. Operations on given tensors have no
# kernel under it, and those that are not intercepted cost no more.
KEY = "BackendSelect"


class Call(NamedTuple):
    """One collective, as it is issued."""

    kind: str  # "all_gather", ...
    given: Any  # the tensors that this rank passes to be sent, possibly in lists ...
    output: Any  # ... and to be filled
    group: Any
    options: Sequence[Any] = ()  # what the operation takes after the group, in the dispatcher's order

    @property
    def bytes_in(self) -> int:
        """Bytes that this rank gives."""
        return _nbytes(self.given)

    @property
    def bytes_out(self) -> int:
        """Bytes that this rank gets."""
        return _nbytes(self.output)


Around = Callable[[Call, Callable[[], Any]], Any]

_listeners: list[Around] = []  # the first is the outermost
_library: list[Library] = []


@contextmanager
def listen_to_calls(around: Around) -> Iterator[None]:
    """Pass all collectives of this process to a function, for as long as the context lasts.

    Args:
        around: Gets the call, and a function that issues it and whose result it returns. Of several that
            listen, the one that began first is the outermost.

    Example::

        kinds = []

        def note(call, issue):
            kinds.append(call.kind)
            return issue()

        with listen_to_calls(note):
            train_step(batch)
    """
    if not _library:
        here = threading.local()  # each thread is inside of a call, or not
        _library.append(Library("c10d", "IMPL", KEY))
        for kind, names in OPERATIONS.items():
            for name in names:
                _library[0].impl(name, _kernel(name, kind, here), with_keyset=True)
    _listeners.append(around)
    try:
        yield
    finally:
        _listeners.remove(around)
        if not _listeners:
            _library.clear()  # the kernels go with the last reference


def _kernel(name: str, kind: str, here: threading.local) -> Callable[..., Any]:
    redispatch = getattr(torch.ops.c10d, name).default.redispatch
    selected = torch.DispatchKeySet(KEY)  # pyright: ignore[reportArgumentType]

    def kernel(keys: Any, *args: Any) -> Any:
        issue: Callable[[], Any] = partial(redispatch, keys - selected, *args)
        if getattr(here, "inside", False):  # what a call issues on its way, is the same call
            return issue()
        # the output, then the input; or one operand that is both; then the group
        at = 1 if isinstance(args[1], torch.ScriptObject) else 2
        given = () if kind in ("barrier", "recv") else args[at - 1]  # barrier's only says on which device
        output = () if kind in ("barrier", "send") else args[0]
        call = Call(kind, given, output, dist.ProcessGroup.unbox(args[at]), args[at + 1 :])
        for around in _listeners[::-1]:
            issue = partial(around, call, issue)
        here.inside = True
        try:
            return issue()
        finally:
            here.inside = False

    return kernel


def when_done(kind: str, result: Any, callback: Callable[[], None]) -> Callable[[], bool]:
    """Call back when a collective is over: on a GPU at once, with a current stream that waits for it.

    Returns a function that says whether it is over, as the callback may come late. Work without a future,
    such as gloo's reduce-scatter, calls nobody: the function then says yes, and is to be asked after a wait.
    """
    if result is None or kind in _without_future:
        return lambda: True
    work = dist.Work.unbox(result[-1] if isinstance(result, tuple) else result)
    if work is None:  # NCCL, and not asynchronous: it is in the order of the current stream
        callback()
        return lambda: True
    try:
        future = work.get_future()
    except RuntimeError:  # "not implemented", of this work or of this backend; slow, so it is tried only once
        _without_future.add(kind)
        return lambda: True
    future.add_done_callback(lambda _: callback())
    return work.is_completed


_without_future: set[str] = set()  # kinds whose work, here, has no future to call back


def _nbytes(tensors: Any) -> int:
    return tensors.nbytes if isinstance(tensors, Tensor) else sum(map(_nbytes, tensors))
