"""Record what a training step allocates and frees, in order: the input of the allocator's simulation."""

import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import wraps
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from fsdp_utils.torch_internals.names import detect_fake_mode, place
from fsdp_utils.torch_internals.runtime import storage_id

GIB = 2**30


@dataclass(frozen=True, slots=True)
class AllocationEvent:
    """One allocation, one free, or the beginning of a training step.

    Example::

        from fsdp_utils.allocator import AllocationEvent, AllocationTrace

        events = [AllocationEvent("alloc", block=1, size=2**30), AllocationEvent("free", block=1, size=2**30)]
        print(AllocationTrace(events).peak_gib)  # 1.0
    """

    kind: str  # "alloc", "free" or "step"
    block: int = 0  # the number that an allocation shares with its free
    size: int = 0  # bytes asked for
    name: str = ""  # the operator that allocated; "" where unknown
    stream: int = 0  # 0 for the stream of the computation; FSDP gathers and reduces in others


@dataclass
class AllocationTrace:
    """Allocations and frees in the order in which a program made them; sizes in bytes."""

    events: list[AllocationEvent] = field(default_factory=list)

    def begin_step(self) -> None:
        """Mark that a training step begins here."""
        self.events.append(AllocationEvent("step"))

    @property
    def peak_gib(self) -> float:
        """The most GiB that were allocated at one time, by the sizes asked for, without rounding."""
        live = peak = 0
        for event in self.events:
            live += event.size if event.kind == "alloc" else -event.size
            peak = max(peak, live)
        return peak / GIB


@contextmanager
def record_allocations(
    *existing: nn.Module | torch.optim.Optimizer | torch.Tensor,
) -> Iterator[AllocationTrace]:
    """Record what the enclosed code allocates and frees on the CPU.

    Inside a FakeTensorMode it traces models far larger than this machine. It does not see the workspaces
    inside kernels. On CPU it counts gloo's copies too; a `fake` process group makes none, like NCCL.

    Args:
        existing: modules, optimizers and tensors made before; they are allocated at the trace's start.

    Returns:
        The trace; call its `begin_step()` where a training step begins.

    Raises:
        TypeError: something that existed before is neither a module, an optimizer nor a tensor.

    Example::

        with record_allocations(model, optimizer) as trace:
            for batch in loader:
                trace.begin_step()
                train_step(batch)
        print(f"{trace.peak_gib:.2f} GiB")
    """
    recorder = Recorder("cpu")
    for item in existing:
        for tensor in _tensors_of(item):
            recorder.observe(tensor, "before the recording")
    with recorder:
        yield recorder.trace


def _tensors_of(item: nn.Module | torch.optim.Optimizer | torch.Tensor) -> Iterator[torch.Tensor]:
    if isinstance(item, nn.Module):
        yield from (one for param in item.parameters() for one in (param, param.grad) if one is not None)
        yield from item.buffers()
    elif isinstance(item, torch.optim.Optimizer):
        yield from (leaf for leaf in tree_leaves(dict(item.state)) if isinstance(leaf, torch.Tensor))
    elif isinstance(item, torch.Tensor):
        yield item
    else:
        raise TypeError(
            f"record_allocations: expected modules, optimizers or tensors, found {type(item).__name__}"
        )


def storages_of(tensor: torch.Tensor) -> Iterator[torch.UntypedStorage]:
    """The storage of a tensor, or those of the tensors that it wraps."""
    if not is_traceable_wrapper_subclass(tensor):
        yield tensor.untyped_storage()
        return
    names, _ = tensor.__tensor_flatten__()
    for inner in (getattr(tensor, name) for name in names):
        if isinstance(inner, torch.Tensor):  # a DTensor names its device mesh, too
            yield from storages_of(inner)


class Recorder(TorchDispatchMode):
    """Tracks storages: sees each operator's result, and the end of its storage through a weak reference.

    A tracker of one purpose extends it: `observe` and `update` see a tensor or storage, `note` each event.
    """

    def __init__(self, device: str | None) -> None:
        super().__init__()
        self.trace = AllocationTrace()
        self.allocated: dict[int, AllocationEvent] = {}  # by storage_id, without empty storages
        self.muted = False
        self._device = device  # whose tensors count; None for all
        # a fake storage lives on "meta", whichever device its tensor claims
        self._storage_device = "meta" if device and detect_fake_mode() else device
        self._watched: dict[int, weakref.ref] = {}
        self._blocks = 0
        self._streams: dict[int, int] = {}
        self._stream_number()  # the stream that is current now gets number 0

    def __enter__(self) -> Any:
        resize, infer = torch.UntypedStorage.resize_, getattr(*place("dtensor_shapes"))

        @wraps(resize)
        def observed_resize(storage: torch.UntypedStorage, size: int) -> Any:
            resized = resize(storage, size)
            if self._storage_device in (None, storage.device.type):
                self.update(storage, "resize_")
            return resized

        @wraps(infer)
        def muted_infer(*args: Any) -> Any:
            self.muted = True
            try:
                return infer(*args)
            finally:
                self.muted = False

        self._patches = ExitStack()
        # FSDP empties and refills its unsharded parameters by this method, which no dispatch mode sees
        self._patches.enter_context(patch.object(torch.UntypedStorage, "resize_", observed_resize))
        # DTensor works out shapes on fake tensors of the global size: nothing is allocated for those
        self._patches.enter_context(patch.object(*place("dtensor_shapes"), muted_infer))
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._patches.close()
        self._watched.clear()  # what is freed from now on is not part of the trace

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # let DTensor act first: its local tensors come back here
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self.observe(leaf, str(func))
        return result

    def observe(self, tensor: torch.Tensor, name: str) -> None:
        if self._device in (None, tensor.device.type) and not self.muted:
            for storage in storages_of(tensor):
                self.update(storage, name)

    def note(self, event: AllocationEvent) -> None:
        self.trace.events.append(event)

    def update(self, storage: torch.UntypedStorage, name: str) -> None:
        key = storage_id(storage)
        if key not in self._watched:
            self._watched[key] = weakref.ref(storage, lambda _: self.forget(key))
        size = storage.nbytes()
        if size == (self.allocated[key].size if key in self.allocated else 0):
            return
        self._free(key)
        if size:
            event = AllocationEvent("alloc", self._blocks, size, name, self._stream_number())
            self._blocks += 1
            self.allocated[key] = event
            self.note(event)

    def forget(self, key: int) -> None:
        self._free(key)
        del self._watched[key]

    def _free(self, key: int) -> None:
        if event := self.allocated.pop(key, None):
            self.note(AllocationEvent("free", event.block, event.size, event.name, event.stream))

    def _stream_number(self) -> int:
        # on CPU torch's streams do nothing, but FSDP enters and leaves them there as it does on a GPU
        module = getattr(torch, self._device or "cpu", None)
        stream = module.current_stream() if module is not None and module.is_available() else None
        key = getattr(stream, "stream_id", id(stream))
        return self._streams.setdefault(key, len(self._streams))
