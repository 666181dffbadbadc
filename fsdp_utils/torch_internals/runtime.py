"""Private state of tensors, modules, autograd, the profiler, the compiler and devices."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from fsdp_utils.torch_internals.names import COMPILED, DYNAMO

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from fsdp_utils.torch_internals.names import ShardedTensor


# tensors and modules


def storage_id(storage: torch.UntypedStorage) -> int:
    """Identifies the memory behind a storage object; data_ptr() would, but a fake tensor has none."""
    return storage._cdata


def sharded_tensor_group(tensor: ShardedTensor) -> Any:
    """The process group that it is sharded over; nothing public gives it."""
    return tensor._process_group


def collect_adamw(optimizer: torch.optim.AdamW, group: dict[str, Any], lists: list[list[Tensor]]) -> bool:
    """Make missing state; fill six lists: params, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, steps.

    AdamW.step() does this first; only the whole of it is public. Returns whether any of them is complex.
    """
    return optimizer._init_group(group, *lists)  # type: ignore[call-arg]


# nn.Module's own tables. named_parameters() and its like leave out None and duplicates, take several times as
# long, and cannot be written to.
def own_parameters(module: nn.Module) -> dict[str, nn.Parameter | None]:
    return module._parameters


def own_buffers(module: nn.Module) -> dict[str, Tensor | None]:
    return module._buffers


def unsaved_buffers(module: nn.Module) -> set[str]:
    """The names of the buffers that state_dict() leaves out; calling it would gather under FSDP1."""
    return module._non_persistent_buffers_set


# autograd, the profiler, the compiler


def when_backward_ends(call: Callable[[], None]) -> None:
    """Inside backward: call a function when all of backward is over, as FSDP does. Hooks see one tensor."""
    import torch

    torch.autograd.Variable._execution_engine.queue_callback(call)  # pyright: ignore


def takes_mean(node: Any) -> tuple[str, list[float]]:
    """The name of the node that takes a mean over elements, "" for none, and the numbers that divide it."""
    divisors, mean = [], 1  # of the losses' `reduction`
    while node is not None and node.name() == "DivBackward0" and node.next_functions[1][0] is None:
        divisors.append(node._saved_other.item())
        node = node.next_functions[0][0]
    name = "" if node is None else node.name()
    return name if name == "MeanBackward0" or getattr(node, "_saved_reduction", 0) == mean else "", divisors


def has_compiled() -> bool:
    """Whether torch.compile has compiled anything in this process; torch.compiler tells only from within."""
    return getattr(sys.modules.get(f"{DYNAMO}.convert_frame"), "FRAME_COUNTER", 0) > 0


def is_under_compile(module: nn.Module) -> bool:
    """Whether it was compiled, in place or in a wrapper; nothing public says it."""
    return module._compiled_call_impl is not None or COMPILED in module._modules


# devices


def hide_apple_gpu() -> None:
    """Have fully_shard's default mesh take the CPU on a Mac: no process group works on "mps" [torch 2.13]."""
    if sys.platform != "darwin":
        return
    import torch

    if torch._C._get_accelerator().type == "mps":
        torch._C._get_accelerator = lambda: torch.device("cpu")
