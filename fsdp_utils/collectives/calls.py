"""Which operations of torch are collectives, what do they move, and how does one listen to them?"""

from __future__ import annotations

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


@contextmanager
def listen_to_calls(around: Callable[[Call, Callable[[], Any]], Any]) -> Iterator[None]:
    """Have all collectives of this process pass by, and nothing else: other operations cost no more.

    For as long as the context lasts, each collective's operation has a kernel under the dispatch key
    BackendSelect. That key comes after autograd's and before those of the backends, has no kernel of its own
    for these operations, and is looked at in every thread.

    Args:
        around: Gets the call, and a function that issues it and whose result it has to return.
    """
    selected = torch._C.DispatchKey.BackendSelect
    inside = False  # a dispatch mode of someone else calls the operation once more: that is the same call

    def kernel_of(kind: str, operation: Any) -> Callable[..., Any]:
        def kernel(keys: Any, *args: Any, **kwargs: Any) -> Any:
            nonlocal inside

            def issue() -> Any:
                return operation.redispatch(keys.remove(selected), *args, **kwargs)

            if inside:
                return issue()
            inside = True
            try:
                return around(_call(kind, args), issue)
            finally:
                inside = False

        return kernel

    with torch.library._scoped_library("c10d", "IMPL") as library:
        for name, kind in KINDS.items():
            if operation := getattr(torch.ops.c10d, name, None):
                library.impl(name, kernel_of(kind, operation.default), selected.name, with_keyset=True)
        yield


def _call(kind: str, args: Sequence[Any]) -> Call:
    place = next(i for i, arg in enumerate(args) if isinstance(arg, torch.ScriptObject))  # of the group
    operands = [_nbytes(arg) for arg in args[:place]]
    output, given = operands[0], operands[-1]  # c10d puts the output first; one operand is both
    if kind == "barrier":
        output = given = 0  # its tensor only says on which device
    group = dist.ProcessGroup.unbox(args[place])
    return Call(kind, 0 if kind == "recv" else given, 0 if kind == "send" else output, group)


def when_done(result: Any, callback: Callable[[], None]) -> Callable[[], bool]:
    """Call back as soon as an operation of c10d on the CPU is over: in the thread that has ended it.

    Returns:
        A function that says whether it is over, for the callback may come late. Not all work has a future to
        call back: gloo's reduce-scatter has none. Then it says yes, and is to be asked after a wait.
    """
    work = dist.Work.unbox(result[-1] if isinstance(result, tuple) else result)
    try:
        future = work.get_future()
    except RuntimeError:  # "not implemented", of this work or of this backend
        return lambda: True
    future.add_done_callback(lambda _: callback())
    return work.is_completed


def _nbytes(tensors: Any) -> int:
    if isinstance(tensors, Tensor):
        return tensors.numel() * tensors.element_size()
    return sum(_nbytes(tensor) for tensor in tensors)
