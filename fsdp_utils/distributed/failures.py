"""When one rank fails in the middle of a training step, how do all ranks stop, and how do they go on?

Two things go wrong by themselves. The peers of the failed rank wait in their next collective until the
process group's timeout, because it never comes there. And the model is left as the exception found it:
FSDP2 then trains on, with wrong gradients and without a word.
"""

import gc
import traceback
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from fsdp_utils.distributed.identity import get_rank, get_world_size
from fsdp_utils.torch_internals.fsdp import fsdp2_is_root
from fsdp_utils.torch_internals.runtime import version

OUT_OF_MEMORY = (torch.OutOfMemoryError, MemoryError)

_RUNNING, _OUT_OF_MEMORY, _FAILED = range(3)  # what the ranks tell each other


class PeerFailed(RuntimeError):
    """Raised on the ranks that did not fail themselves, so that they stop where the failed rank did."""

    def __init__(self, ranks: list[int], *, out_of_memory: bool) -> None:
        what = "ran out of memory" if out_of_memory else "failed: its own error says how"
        super().__init__(f"rank {', '.join(map(str, ranks))} {what}")
        self.out_of_memory = out_of_memory


class CannotGoOn(RuntimeError):
    """The training step was interrupted in a way that leaves nothing to go on with."""


class Lockstep:
    """The ranks of the default process group, agreeing over a gloo group of their own.

    All ranks must create it. A single process, and one with a `fake` group, agrees with itself.

    Args:
        timeout: seconds that a rank waits for the others at most, each time.
    """

    def __init__(self, timeout: float) -> None:
        self.world_size = 1
        self._group: Any = None
        self._timeout = timeout
        if dist.is_available() and dist.is_initialized() and dist.get_backend() != "fake":
            self.world_size = get_world_size()
        if self.world_size > 1:
            with self._waiting():
                self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout))

    def close(self) -> None:
        """End the group. To be called on every rank, after failures too."""
        if self._group is not None:
            dist.destroy_process_group(self._group)
            self._group = None

    def gather(self, value: Any) -> list[Any]:
        """What each rank gave, by rank."""
        if self._group is None:
            return [value]
        values: list[Any] = [None] * self.world_size
        with self._waiting():
            dist.all_gather_object(values, value, group=self._group)
        return values

    @contextmanager
    def together(self) -> Iterator[None]:
        """Run a body that ends on all ranks as soon as it fails on one.

        Before each collective of the body the ranks ask each other whether all are well. So where one has
        failed, all have begun the same collectives, and the process group remains usable. Every rank must
        issue the same number of collectives, as data parallel training does.

        Raises:
            PeerFailed: it failed on another rank. On the failed rank its own exception is raised.
        """
        if self._group is None:
            yield
            return
        ask = _AskBeforeCollectives(self)
        try:
            with ask:
                yield
            ask.how_are_you()  # others may have failed after their last collective
        except OUT_OF_MEMORY:
            ask.tell(_OUT_OF_MEMORY)
            raise
        except BaseException:
            with suppress(CannotGoOn):  # what has failed here is the news, not that nobody listens
                ask.tell(_FAILED)
            raise

    def exchange(self, state: int) -> list[int]:
        """The state of each rank, by rank."""
        states = [torch.zeros(1, dtype=torch.int64) for _ in range(self.world_size)]
        with self._waiting():
            dist.all_gather(states, torch.tensor([state]), group=self._group)
        return [int(state) for state in states]

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:  # of gloo: a limit was reached, or a connection is gone
            raise CannotGoOn(
                f"rank {get_rank()} heard nothing from another rank within {self._timeout:g} s, or that rank "
                "is gone. Every rank must take part, and issue the same collectives."
            ) from error


class _AskBeforeCollectives(TorchDispatchMode):
    """Sees every collective before it begins, whoever issues it: FSDP in its hooks, the optimizer, you."""

    supports_higher_order_operators = True

    def __init__(self, ranks: Lockstep) -> None:
        super().__init__()
        self._ranks = ranks
        self._over: BaseException | None = None  # set once the ranks have parted

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # torch.compile compiles as it does without this mode

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "c10d" in func.namespace and not func.__name__.startswith("wait"):
            self.how_are_you()
        return func(*args, **(kwargs or {}))

    def how_are_you(self) -> None:
        """Tell the others that this rank is well.

        Raises:
            PeerFailed: another one is not.
        """
        if self._over is None:
            try:
                states = self._ranks.exchange(_RUNNING)
                if any(states):
                    ill = [rank for rank, state in enumerate(states) if state]
                    self._over = PeerFailed(ill, out_of_memory=_FAILED not in states)
            except CannotGoOn as error:
                self._over = error
        if self._over is not None:  # also when the body has caught it and goes on
            raise self._over

    def tell(self, state: int) -> None:
        """Tell the others that this rank has failed, unless they know."""
        if self._over is None:
            self._ranks.exchange(state)


class Gradients:
    """The gradients that exist when it is created, to tell later which ones a training step has left."""

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
    """They change with each operation in place. FSDP2 adds to the local part of a gradient."""
    parts = [gradient]
    if dist.is_available():
        from torch.distributed.tensor import DTensor

        if isinstance(gradient, DTensor):
            with torch.no_grad():  # then it is the part itself
                parts.append(gradient.to_local())
    return [version(part) for part in parts if not part.is_inference()]


def recover(error: BaseException, before: Gradients) -> None:
    """Undo what an exception in the middle of a training step leaves behind in the models of this process.

    Call it on every rank that the exception, or a PeerFailed, has stopped. It drops what the frames of the
    exception hold, the gradients that the step has made or changed, and the state that FSDP2's units were in.

    Args:
        error: The exception.
        before: The gradients that there were when the step began.

    Raises:
        CannotGoOn: there is a model that cannot be reset: FSDP1 that was interrupted, or FSDP2 in a torch
            without `FSDPModule.reset_iter_state`.
    """
    link: BaseException | None = error
    while link is not None:
        traceback.clear_frames(link.__traceback__)  # the activations hang on their variables
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
        # Of an FSDP2 model only the root can be reset; before its first forward nobody is root.
        if not fsdp2_is_root(module):
            continue
        if not hasattr(module, "reset_iter_state"):
            raise CannotGoOn(
                f"torch {torch.__version__} cannot reset an FSDP2 model after an exception: "
                "it has no FSDPModule.reset_iter_state."
            )
        module.reset_iter_state()
    if any(module.training_state.name != "IDLE" for module in _alive(FullyShardedDataParallel)):
        raise CannotGoOn("an FSDP1 model cannot be reset after an exception; an FSDP2 model can.")


def _alive(kind: type) -> list[Any]:
    """All objects of this kind in the process."""
    objects = gc.get_objects()
    kinds = {found for found in set(map(type, objects)) if issubclass(found, kind)}
    return [thing for thing in objects if type(thing) in kinds]
