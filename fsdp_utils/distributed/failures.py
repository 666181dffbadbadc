"""Rank failures in the middle of a training step: stop all ranks at the same place, and recover.

Without this, the peers of a failed rank wait in their next collective until the process group's timeout,
because the failed rank never comes there. And the model is left as the exception found it: FSDP2 then trains
on, with wrong gradients and without a word.
"""

import gc
import traceback
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from fsdp_utils.distributed.agreement import Ranks
from fsdp_utils.torch_internals.fsdp import fsdp2_is_root
from fsdp_utils.torch_internals.runtime import version

_RUNNING, _OUT_OF_MEMORY, _FAILED = range(3)  # what the ranks tell each other

# RuntimeErrors that mean the same as torch.OutOfMemoryError: of the CUDA runtime ("CUDA error: out of
# memory"), of CUDA's libraries (CUBLAS_STATUS_ALLOC_FAILED), of torch's allocator for the CPU.
_OUT_OF_MEMORY_WORDS = (
    "out of memory",
    "_STATUS_ALLOC_FAILED",
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",
)


class PeerFailed(RuntimeError):
    """Raised on the ranks that did not fail themselves, so that they stop where the failed rank did."""

    def __init__(self, ranks: list[int], *, out_of_memory: bool) -> None:
        what = "ran out of memory" if out_of_memory else "failed: its own error says how"
        super().__init__(f"rank {', '.join(map(str, ranks))} {what}")
        self.out_of_memory = out_of_memory


class CannotRecover(RuntimeError):
    """The training step was interrupted in a way after which training cannot continue."""


def is_out_of_memory(error: BaseException) -> bool:
    """Did this rank run out of memory, on the device or on the host?"""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    if not isinstance(error, RuntimeError) or isinstance(error, PeerFailed | CannotRecover):
        return False
    return any(words in str(error) for words in _OUT_OF_MEMORY_WORDS)


@contextmanager
def stop_together(ranks: Ranks) -> Iterator[None]:
    """Run a body that ends on all ranks as soon as it fails on one.

    Before each collective of the body the ranks exchange whether one of them has failed. So where one has,
    all have begun the same collectives, and the process group remains usable. Every rank must issue the same
    number of collectives, as data parallel training does.

    Raises:
        PeerFailed: it failed on another rank. On the failed rank its own exception is raised.
    """
    if ranks.world_size == 1:
        yield
        return
    check = _CheckBeforeCollectives(ranks)
    try:
        with check:
            yield
        check.exchange()  # others may have failed after their last collective
    except BaseException as error:
        if is_out_of_memory(error):
            check.report(_OUT_OF_MEMORY)
        else:
            with suppress(CannotRecover):  # this rank's own failure is the news, not that nobody listens
                check.report(_FAILED)
        raise


class _CheckBeforeCollectives(TorchDispatchMode):
    """Sees every collective before it begins, whoever issues it: FSDP in its hooks, the optimizer, you."""

    supports_higher_order_operators = True

    def __init__(self, ranks: Ranks) -> None:
        super().__init__()
        self._ranks = ranks
        self._over: BaseException | None = None  # set once a rank has failed

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # torch.compile compiles as it does without this mode

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "c10d" in func.namespace and not func.__name__.startswith("wait"):
            self.exchange()
        return func(*args, **(kwargs or {}))

    def exchange(self) -> None:
        """Report success to the other ranks.

        Raises:
            PeerFailed: another one has failed.
        """
        if self._over is None:
            try:
                states = self._states(_RUNNING)
                if any(states):
                    failed = [rank for rank, state in enumerate(states) if state]
                    self._over = PeerFailed(failed, out_of_memory=_FAILED not in states)
            except CannotRecover as error:
                self._over = error
        if self._over is not None:  # also when the body has caught it and goes on
            raise self._over

    def report(self, state: int) -> None:
        """Tell the other ranks that this one has failed, unless they know."""
        if self._over is None:
            self._states(state)

    def _states(self, state: int) -> list[int]:
        with self._ranks.guard():
            return self._ranks.numbers(state)


class Gradients:
    """The gradients that exist when it is created: what a failed step adds to them can be dropped."""

    def __init__(self) -> None:
        self._known = {
            (id(owner), name): (weakref.ref(gradient), _versions(gradient))
            for owner, name, gradient in _gradients()
        }

    def drop_others(self) -> None:
        """Drop the gradients of this process that were made or changed since."""
        for owner, name, gradient in list(_gradients()):
            known, versions = self._known.get((id(owner), name), (None, None))
            if known is None or known() is not gradient or versions != _versions(gradient):
                setattr(owner, name, None)


def _gradients() -> Iterator[tuple[Any, str, torch.Tensor]]:
    """Each gradient, with the object and the name of the attribute that hold it."""
    for tensor in _alive(torch.Tensor):
        with suppress(RuntimeError):  # a view of FSDP1's whose base was changed in place does not tell
            if tensor.is_leaf and tensor.grad is not None:
                yield tensor, "grad", tensor.grad
    if dist.is_available():
        from fsdp_utils.torch_internals.names import FSDPParam

        for parameter in _alive(FSDPParam):
            # of microbatches before the one that failed; in torch 2.15 it is the grad of a tensor, as above
            accumulated = vars(parameter).get("unsharded_accumulated_grad")
            if accumulated is not None:
                yield parameter, "unsharded_accumulated_grad", accumulated


def _versions(gradient: torch.Tensor) -> list[int]:
    """The version counters of a gradient, which each in-place operation changes.

    FSDP2 adds to the local part of a gradient, so a DTensor has two.
    """
    parts = [gradient]
    if dist.is_available():
        from torch.distributed.tensor import DTensor

        if isinstance(gradient, DTensor):
            with torch.no_grad():  # then it is the part itself
                parts.append(gradient.to_local())
    return [version(part) for part in parts if not part.is_inference()]


def recover(error: BaseException, before: Gradients) -> None:
    """Reset the models of this process after an exception in the middle of a training step.

    Call it on every rank that the exception, or a PeerFailed, has stopped. It drops the variables of the
    exception's frames, the gradients that the step has made or changed, and the state of FSDP2's units.

    Args:
        error: The exception.
        before: The gradients that there were when the step began.

    Raises:
        CannotRecover: there is a model that cannot be reset: FSDP1 that was interrupted, or FSDP2 in a torch
            without `FSDPModule.reset_iter_state`.
    """
    link: BaseException | None = error
    while link is not None:
        traceback.clear_frames(link.__traceback__)  # their variables hold the activations
        link = link.__context__
    gc.collect()

    # reset_iter_state does not do this [torch 2.13]: the unit whose backward was interrupted keeps the
    # gradients it had so far, out of reach of zero_grad(), and adds them to those of the next step.
    before.drop_others()
    if dist.is_available():
        _reset_fsdp()


def _reset_fsdp() -> None:
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

    for module in _alive(FSDPModule):
        # Only the root of an FSDP2 model can be reset; before its first forward there is no root.
        if not fsdp2_is_root(module):
            continue
        if not hasattr(module, "reset_iter_state"):
            raise CannotRecover(
                f"torch {torch.__version__} cannot reset an FSDP2 model after an exception: "
                "it has no FSDPModule.reset_iter_state."
            )
        module.reset_iter_state()
    if any(module.training_state.name != "IDLE" for module in _alive(FullyShardedDataParallel)):
        raise CannotRecover("an FSDP1 model cannot be reset after an exception; an FSDP2 model can.")


def _alive(kind: type) -> list[Any]:
    """All objects of this kind in the process."""
    objects = gc.get_objects()
    kinds = {found for found in set(map(type, objects)) if issubclass(found, kind)}
    return [thing for thing in objects if type(thing) in kinds]
