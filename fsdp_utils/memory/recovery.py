"""Recovery from running out of memory in the middle of a training step, on one rank or on several.

Without it the other ranks wait in a collective that the failed rank never reaches. And the model is left as
the exception found it: FSDP2 then trains on, with wrong gradients and without a word.
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

# RuntimeErrors that mean the same as torch.OutOfMemoryError: of the CUDA runtime ("CUDA error: out of
# memory"), of CUDA's libraries (CUBLAS_STATUS_ALLOC_FAILED), of torch's allocator for the CPU.
_OUT_OF_MEMORY_WORDS = (
    "out of memory",
    "_STATUS_ALLOC_FAILED",
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",
)


class StepFailed(RuntimeError):
    """A training step failed on some rank, and training cannot continue."""


class StepOutOfMemory(StepFailed):
    """A training step ran out of memory on some rank, and has ended on all ranks at the same collective."""


def is_out_of_memory(error: BaseException) -> bool:
    """Did this rank run out of memory, on the device or on the host?"""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _OUT_OF_MEMORY_WORDS)


def run_together(ranks: Ranks, step: Callable[[], object]) -> None:
    """Run a training step that ends on all ranks as soon as it fails on one.

    Before each collective of the step the ranks exchange whether one of them has failed. So where one has,
    all have begun the same collectives, and the process group remains usable. Every rank must issue the same
    number of collectives, as data parallel training does.

    Args:
        ranks: of `agree`, with StepFailed for their error.
        step: the training step.

    Raises:
        StepOutOfMemory: it ran out of memory on some rank; `recover` makes the model usable again.
        StepFailed: it failed otherwise on another rank, or a rank is gone.
        Exception: what the step raised on this rank.
    """
    check = _CheckBeforeCollectives(ranks)
    try:
        with check:
            step()
    except Exception as error:
        if check.failure is not None:
            raise check.failure from None
        if is_out_of_memory(error):
            check.exchange(StepOutOfMemory("out of memory"))
        with suppress(StepFailed):  # this rank's own error is the news, not how the others take it
            check.exchange(error)
        raise
    check.exchange()  # others may have failed after their last collective


class _CheckBeforeCollectives(TorchDispatchMode):
    """Sees every collective before it begins, whoever issues it: FSDP in its hooks, the optimizer, you."""

    supports_higher_order_operators = True

    def __init__(self, ranks: Ranks) -> None:
        super().__init__()
        self.failure: StepFailed | None = None
        self._ranks = ranks

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # torch.compile compiles as it does without this mode

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "c10d" in func.namespace and not func.__name__.startswith("wait"):
            self.exchange()
        return func(*args, **(kwargs or {}))

    def exchange(self, problem: Exception | None = None) -> None:
        """Report success or a problem of this rank to the others; raise what any rank has reported."""

        def report() -> None:
            if problem is not None:
                raise problem

        if self.failure is None:
            try:
                with self._ranks.guard():
                    self._ranks.each(report)
            except StepFailed as error:
                self.failure = error
        if self.failure is not None:  # also when the step has caught it and goes on
            raise self.failure


def recover(error: BaseException) -> None:
    """Reset the models of this process after an exception has stopped a training step.

    Call it on every rank that has stopped. It drops the variables of the exception's frames, the gradients of
    all tensors of this process, and the state of FSDP2's units.

    Raises:
        StepFailed: there is a model that cannot be reset: FSDP1 that was interrupted, or FSDP2 in a torch
            without `FSDPModule.reset_iter_state`.
    """
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
        # reset_iter_state leaves them [torch 2.13], and the next backward would add to them
        parameter.unsharded_accumulated_grad = None
    for module in _alive(FSDPModule):
        if not fsdp2_is_root(module):  # only a root can be reset, and there is none before the first forward
            continue
        if not hasattr(module, "reset_iter_state"):
            raise StepFailed(
                f"find_batch_size: torch {torch.__version__} cannot reset an FSDP2 model after an exception: "
                "it has no FSDPModule.reset_iter_state."
            )
        module.reset_iter_state()
    if any(module.training_state.name != "IDLE" for module in _alive(FullyShardedDataParallel)):
        raise StepFailed(
            "find_batch_size: an FSDP1 model cannot be reset after an exception; an FSDP2 model can."
        )


def _alive(kind: type) -> list[Any]:
    """All objects of this kind in the process."""
    return [thing for thing in gc.get_objects() if issubclass(type(thing), kind)]
