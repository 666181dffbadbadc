"""A meter of a training step: collectives, bytes gathered, and the peak of gathered parameters."""

from collections.abc import Iterable
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# The names under which FSDP1, FSDP2, plain torch.distributed calls and functional collectives (those of
# DTensor) reach the dispatcher.
ALL_GATHERS = {"c10d::allgather_", "c10d::_allgather_base_", "_c10d_functional::all_gather_into_tensor"}
REDUCE_SCATTERS = {
    "c10d::reduce_scatter_",
    "c10d::_reduce_scatter_base_",
    "_c10d_functional::reduce_scatter_tensor",
}
COPY_OUT = "fsdp::split_with_sizes_copy"  # FSDP2 copies each parameter out of the gathered buffer


class Meter(TorchDispatchMode):
    """Counts, on this rank, what a training step gathers, and how much of it is alive at once.

    Every operation inside of the `with` block passes through it, those of the backward pass too. A tensor
    counts as long as its storage holds bytes: a parameter that FSDP has emptied no longer counts.

    Args:
        held: Tensors that this rank holds already, such as `model.parameters()` of a sharded model.
        device: Count only what is alive on this type of device. Default: all devices together.

    Attributes:
        all_gathers, reduce_scatters: Number of such collectives.
        gathered_bytes: Bytes that the all-gathers produced, padding included.
        whole_bytes: After each operation, bytes of gathered parameters that were alive.
        gather_bytes: The same with the buffers of all-gathers. FSDP2 copies each parameter out of such a
            buffer and keeps the buffer until the next unit was gathered.
        held_bytes: Bytes of what was held already.
        tensor_bytes: After each operation, bytes of all tensors that were alive. Differs a little from run to
            run where ranks talk, because gloo's threads free a buffer some time after the collective.

    Example::

        with Meter(model.parameters()) as meter:
            model(**batch).loss.backward()
        print(meter.all_gathers, meter.peak_whole_bytes)
    """

    def __init__(self, held: Iterable[Tensor] = (), *, device: torch.device | str | None = None) -> None:
        super().__init__()
        self.all_gathers = self.reduce_scatters = self.gathered_bytes = 0
        self.whole_bytes: list[int] = []
        self.gather_bytes: list[int] = []
        self.tensor_bytes: list[int] = []
        self._kind = None if device is None else torch.device(device).type
        self._whole: WeakSet[torch.UntypedStorage] = WeakSet()
        self._buffers: WeakSet[torch.UntypedStorage] = WeakSet()
        self._others: WeakSet[torch.UntypedStorage] = WeakSet()
        self._others.update(map(_storage, held))
        self.held_bytes = self._alive(self._others)

    @property
    def peak_tensor_bytes(self) -> int:
        """The most bytes that tensors of any kind held at once."""
        return max(self.tensor_bytes, default=0)

    @property
    def peak_whole_bytes(self) -> int:
        """The most bytes of gathered parameters that were alive at once."""
        return max(self.whole_bytes, default=0)

    @property
    def peak_gather_bytes(self) -> int:
        """The most bytes of gathered parameters and all-gather buffers that were alive at once."""
        return max(self.gather_bytes, default=0)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # let DTensor come down to the local tensors first
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        name = func.name()
        if name in ALL_GATHERS:
            gathered = _tensors(args[0] if name.startswith("c10d") else result)
            self.all_gathers += 1
            self.gathered_bytes += sum(tensor.nbytes for tensor in gathered)
            self._move(gathered, self._whole)
        elif name == COPY_OUT:  # from here on the copies are the parameters
            self._move([args[0]], self._buffers)
            self._move(kwargs["out"], self._whole)
        else:
            self.reduce_scatters += name in REDUCE_SCATTERS
            storages = set(map(_storage, _tensors((result, kwargs.get("out")))))
            self._others.update(s for s in storages if s not in self._whole and s not in self._buffers)
        self.whole_bytes.append(self._alive(self._whole))
        self.gather_bytes.append(self.whole_bytes[-1] + self._alive(self._buffers))
        self.tensor_bytes.append(self.gather_bytes[-1] + self._alive(self._others))
        return result

    def _move(self, tensors: Iterable[Tensor], to: WeakSet[torch.UntypedStorage]) -> None:
        for storage in map(_storage, tensors):
            for storages in (self._whole, self._buffers, self._others):
                storages.discard(storage)
            to.add(storage)

    def _alive(self, storages: WeakSet[torch.UntypedStorage]) -> int:
        return sum(s.nbytes() for s in storages if self._kind in (None, s.device.type))


def _storage(tensor: Tensor) -> torch.UntypedStorage:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).untyped_storage()


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
