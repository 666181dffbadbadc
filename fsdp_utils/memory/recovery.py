"""Recovery from running out of memory in the middle of a training step, on one rank or on several.

Without it the other ranks wait for the failed one, and FSDP2 trains on with wrong gradients.
"""

import gc
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fsdp_utils.distributed.agreement import Ranks
from fsdp_utils.torch_internals.fsdp import fsdp2_is_root

# RuntimeErrors of the CUDA runtime, of CUDA's libraries, of torch's allocator for the CPU
_OUT_OF_MEMORY_WORDS = ("out of memory", "_STATUS_ALLOC_FAILED", "DefaultCPUAllocator: ")
_FINE, _OUT_OF_MEMORY, _FAILED = 0, 1, 2  # the state of a rank in the step


class StepFailed(RuntimeError):
    """A training step failed on some rank, and training cannot continue."""


class StepOutOfMemory(StepFailed):
    """A training step ran out of memory on some rank, and has ended on all ranks at the same collective."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a rank ran out of memory, on the device or on the host."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError | StepOutOfMemory):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _OUT_OF_MEMORY_WORDS)


def run_together(ranks: Ranks, step: Callable[[], object]) -> None:
    """Run a training step that ends on all ranks before the same collective as soon as it fails on one."""
    check = _CheckBeforeCollectives(ranks)
    try:
        with check:
            step()
    except StepFailed:
        raise
    except Exception as error:
        check.exchange(_OUT_OF_MEMORY if is_out_of_memory(error) else _FAILED)
        raise
    check.exchange(_FINE)  # others may have failed after their last collective


class _CheckBeforeCollectives(TorchDispatchMode):
    """Exchange the ranks' states before each collective, whoever issues it. All ranks must issue as many."""

    supports_higher_order_operators = True

    def __init__(self, ranks: Ranks) -> None:
        super().__init__()
        self._ranks = ranks
        self._found = [_FINE]  # by rank

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # torch.compile compiles as it does without this mode

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "c10d" in func.namespace and not func.__name__.startswith("wait"):
            self.exchange(_FINE)
        return func(*args, **(kwargs or {}))

    def exchange(self, mine: int) -> None:
        """Tell the other ranks the state of this one; raise if another rank has failed."""
        if not any(self._found):  # else the step has caught it and goes on
            self._found = self._ranks.numbers(mine)
        if _FAILED in self._found and mine != _FAILED:
            raise StepFailed(f"find_batch_size: the step failed on rank {self._found.index(_FAILED)}.")
        if _OUT_OF_MEMORY in self._found and mine != _FAILED:
            raise StepOutOfMemory("find_batch_size: out of memory")


def recover(error: BaseException) -> None:
    """Drop the variables of the exception's frames, all gradients, and the state of FSDP2's units."""
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

    from fsdp_utils.torch_internals.names import FSDPParam

    link: BaseException | None = error
    while link is not None:
        traceback.clear_frames(link.__traceback__)  # their variables hold the activations
        link = link.__context__
    gc.collect()
    for tensor in _alive(torch.Tensor):
        with suppress(RuntimeError):  # a view of FSDP1's whose base was changed in place has no is_leaf
            if tensor.is_leaf:
                tensor.grad = None
    for parameter in _alive(FSDPParam):
        parameter.unsharded_accumulated_grad = None  # which reset_iter_state leaves [torch 2.13]
    roots = [module for module in _alive(FSDPModule) if fsdp2_is_root(module)]
    fsdp1 = any(module.training_state.name != "IDLE" for module in _alive(FullyShardedDataParallel))
    if fsdp1 or (roots and not hasattr(FSDPModule, "reset_iter_state")):
        raise StepFailed(
            "find_batch_size: an FSDP1 model cannot be reset after an exception. An FSDP2 model can, from "
            f"torch 2.13 on; this is torch {torch.__version__}."
        )
    for root in roots:
        root.reset_iter_state()


def _alive(kind: type) -> list[Any]:
    return [thing for thing in gc.get_objects() if issubclass(type(thing), kind)]
