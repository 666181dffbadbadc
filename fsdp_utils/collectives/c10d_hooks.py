"""Which calls of torch are collectives, what do they move, and how does one listen to them?"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fsdp_utils.collectives import dispatcher
from fsdp_utils.collectives.fsdp_hooks import Wrapper, as_it_is

# What Python alone issues, by methods of a process group: FSDP's collectives of every unit are among it. To
# listen here costs a tenth of a millisecond less, in each call, than in the dispatcher.
METHODS = {
    "allgather": "all_gather",  # FSDP1's on the CPU; the constructor of DDP issues it from C++
    "all_gather_single": "all_gather",
    "_allgather_base": "all_gather",  # its older name
    "allgather_coalesced": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "reduce_scatter_single": "reduce_scatter",
    "_reduce_scatter_base": "reduce_scatter",  # its older name
    "reduce": "reduce",
    "gather": "gather",
    "scatter": "scatter",
    "alltoall": "all_to_all",
    "recv_anysource": "recv",
    "barrier": "barrier",
}
# What C++ issues too, for DDP and for DTensor's functional collectives, by the names under which it reaches
# the dispatcher, whoever issues it.
OPERATIONS = {
    "allgather_into_tensor_coalesced_": "all_gather",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce",
    "broadcast_": "broadcast",
    "alltoall_base_": "all_to_all",
    "send": "send",
    "recv_": "recv",
}
# These issue from C++ what FSDP issues by methods; torch.compile puts them into its graphs. Their first call
# tells that it is to be listened to in the dispatcher as well.
FUNCTIONAL = ("all_gather_into_tensor_out", "reduce_scatter_tensor_out")
OF_FUNCTIONAL = {"_allgather_base_": "all_gather", "_reduce_scatter_base_": "reduce_scatter"}


class Call(NamedTuple):
    """One collective, as it is issued.

    Args:
        kind: "all_gather", ...
        bytes_in, bytes_out: What this rank gives and gets.
        group: The process group that it runs on.
    """

    kind: str
    bytes_in: int
    bytes_out: int
    group: Any


Around = Callable[[Call, Callable[[], Any]], Any]


@contextmanager
def listen_to_calls(around: Around, hidden: Wrapper = as_it_is) -> Iterator[None]:
    """Have all collectives of this process pass by, for as long as the context lasts.

    Args:
        around: Gets the call, and a function that issues it and whose result it has to return.
        hidden: Applied to each function that is called from outside, to keep torch.compile out of it.
    """
    calls = _Calls(around)
    # as they stand in the class; what getattr gives of a function from C++ would not bind to a group again
    methods = {name: vars(dist.ProcessGroup)[name] for name in METHODS if name in vars(dist.ProcessGroup)}
    c10d, functional = dispatcher.Kernels("c10d"), dispatcher.Kernels("_c10d_functional")

    is_first = True

    def functional_call(_args: Any, issue: Callable[[], Any]) -> Any:
        nonlocal is_first
        if is_first:
            is_first = False
            c10d.add(OF_FUNCTIONAL, lambda name: calls.operation(OF_FUNCTIONAL[name]))
        return issue()

    try:
        for name in methods:
            method = getattr(dist.ProcessGroup, name)
            setattr(dist.ProcessGroup, name, hidden(calls.method(METHODS[name], method)))
        c10d.add(OPERATIONS, lambda name: calls.operation(OPERATIONS[name]))
        functional.add(FUNCTIONAL, lambda _: functional_call)
        yield
    finally:
        functional.close()
        c10d.close()
        for name, method in methods.items():
            setattr(dist.ProcessGroup, name, method)


class _Here(threading.local):
    """Is this thread inside of a call?"""

    inside = False


class _Calls:
    """What stands in the place of methods and operations, and tells of their calls."""

    def __init__(self, around: Around) -> None:
        self._around = around
        # what a call does on its way, as to reach the dispatcher, is the same call; each thread has its own
        self._here = _Here()

    def method(self, kind: str, method: Callable[..., Any]) -> Callable[..., Any]:
        """For a method of ProcessGroup."""

        def call(group: Any, *args: Any, **kwargs: Any) -> Any:
            if self._here.inside:
                return method(group, *args, **kwargs)
            return self._tell(kind, (*args, *kwargs.values()), group, lambda: method(group, *args, **kwargs))

        return call

    def operation(self, kind: str) -> dispatcher.Around:
        """For an operation of c10d, which is given the group after its tensors."""

        def call(args: tuple[Any, ...], issue: Callable[[], Any]) -> Any:
            if self._here.inside:
                return issue()
            group = args[1] if isinstance(args[1], torch.ScriptObject) else args[2]
            return self._tell(kind, args, dist.ProcessGroup.unbox(group), issue)

        return call

    def _tell(self, kind: str, args: tuple[Any, ...], group: Any, issue: Callable[[], Any]) -> Any:
        bytes_in = bytes_out = 0
        if kind != "barrier":  # its tensor only says on which device
            # first the output, then the input; or one operand that is both
            output, given, *_ = (*args, None)
            given = given if isinstance(given, Tensor | list | tuple) else output
            bytes_in = 0 if kind == "recv" else _nbytes(given)
            bytes_out = 0 if kind == "send" else _nbytes(output)
        self._here.inside = True
        try:
            return self._around(Call(kind, bytes_in, bytes_out, group), issue)
        finally:
            self._here.inside = False


_without_future: set[str] = set()  # kinds whose work, here, has no future to call back


def when_done(kind: str, result: Any, callback: Callable[[], None]) -> Callable[[], bool]:
    """Call back as soon as a collective on the CPU is over: in the thread that has ended it.

    Args:
        kind: Of the call.
        result: What issuing it gave.
        callback: Gets nothing.

    Returns:
        A function that says whether it is over, for the callback may come late. Not all work has a future to
        call back: gloo's reduce-scatter has none. Then it says yes, and is to be asked after a wait.
    """
    if result is None or kind in _without_future:
        return lambda: True
    work = result
    if not isinstance(work, dist.Work):  # an operation's
        work = dist.Work.unbox(result[-1] if isinstance(result, tuple) else result)
    try:
        future = work.get_future()
    except RuntimeError:  # "not implemented", of this work or of this backend; slow, so it is tried only once
        _without_future.add(kind)
        return lambda: True
    future.add_done_callback(lambda _: callback())
    return work.is_completed


def _nbytes(tensors: Any) -> int:
    if isinstance(tensors, Tensor):
        return tensors.nbytes
    return sum(map(_nbytes, tensors))
