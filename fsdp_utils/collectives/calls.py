"""Which operations of torch are collectives, what do they move, and how does one listen to them?"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

# By the names under which they reach the dispatcher, whoever calls them: FSDP1, FSDP2, DDP's reducer in C++,
# DTensor, or torch.distributed.all_gather.
KINDS = {
    "allgather_": "all_gather",
    "_allgather_base_": "all_gather",
    "allgather_coalesced_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather",
    "reduce_scatter_": "reduce_scatter",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce",
    "broadcast_": "broadcast",
    "reduce_": "reduce",
    "gather_": "gather",
    "scatter_": "scatter",
    "alltoall_": "all_to_all",
    "alltoall_base_": "all_to_all",
    "send": "send",
    "recv_": "recv",
    "barrier": "barrier",
}


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
_KEY = "BackendSelect"
_listening: Around | None = None  # who gets the calls
_inside = False  # a dispatch mode of someone else calls the operation once more: that is the same call


@contextmanager
def listen_to_calls(around: Around) -> Iterator[None]:
    """Have all collectives of this process pass by, and nothing else: other operations cost no more.

    For as long as the context lasts, each collective's operation has a kernel under the dispatch key
    BackendSelect. That key comes after autograd's and before those of the backends, has no kernel of its own
    for these operations, and is looked at in every thread.

    Args:
        around: Gets the call, and a function that issues it and whose result it has to return.
    """
    global _listening
    # torch.library.Library takes longer for the same, which a recording of one short step would feel
    library: Any = torch._C._dispatch_library("IMPL", "c10d", _KEY, __file__, 0)
    _listening = around
    try:
        for name, kernel in _kernels():
            library.impl(name, _KEY, kernel, True)
        yield
    finally:
        library.reset()
        _listening = None


@functools.cache
def _kernels() -> list[tuple[str, Callable[..., Any]]]:
    return [
        (name, _kernel(kind, operation.default))
        for name, kind in KINDS.items()
        if (operation := getattr(torch.ops.c10d, name, None))
    ]


def _kernel(kind: str, operation: Any) -> Callable[..., Any]:
    selected = torch._C.DispatchKey.BackendSelect

    def kernel(keys: Any, *args: Any, **kwargs: Any) -> Any:
        global _inside

        def issue() -> Any:
            return operation.redispatch(keys.remove(selected), *args, **kwargs)

        if _inside or _listening is None:
            return issue()
        _inside = True
        try:
            return _listening(_call(kind, args), issue)
        finally:
            _inside = False

    return kernel


def _call(kind: str, args: Sequence[Any]) -> Call:
    # c10d puts the output first, then the input, then the group; one operand is both
    output, second = args[0], args[1]
    given, group = (output, second) if isinstance(second, torch.ScriptObject) else (second, args[2])
    bytes_in, bytes_out = _nbytes(given), _nbytes(output)
    if kind in ("barrier", "recv"):  # a barrier's tensor only says on which device
        bytes_in = 0
    if kind in ("barrier", "send"):
        bytes_out = 0
    return Call(kind, bytes_in, bytes_out, dist.ProcessGroup.unbox(group))


_without_future: set[str] = set()  # kinds whose work, here, has no future to call back


def when_done(kind: str, result: Any, callback: Callable[[], None]) -> Callable[[], bool]:
    """Call back as soon as an operation of c10d on the CPU is over: in the thread that has ended it.

    Returns:
        A function that says whether it is over, for the callback may come late. Not all work has a future to
        call back: gloo's reduce-scatter has none. Then it says yes, and is to be asked after a wait.
    """
    if kind in _without_future:
        return lambda: True
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
        return tensors.numel() * tensors.element_size()
    return sum(_nbytes(tensor) for tensor in tensors)
