"""A meter of a training step: collectives, bytes gathered, and the peak of gathered parameters."""

import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fsdp_utils.torch_internals.runtime import storage_id

# The names under which FSDP1, FSDP2, plain torch.distributed calls and functional collectives (those of
# DTensor) reach the dispatcher.
ALL_GATHERS = {"c10d::allgather_", "c10d::_allgather_base_", "_c10d_functional::all_gather_into_tensor"}
REDUCE_SCATTERS = {
    "c10d::reduce_scatter_",
    "c10d::_reduce_scatter_base_",
    "_c10d_functional::reduce_scatter_tensor",
}
COPY_OUT = "fsdp::split_with_sizes_copy"  # FSDP2 copies each parameter out of what was gathered


class Meter(TorchDispatchMode):
    """Counts, on this rank, what a training step gathers, and how much of it is alive at once.

    Every operation that runs inside the `with` block passes through it, those of the backward
    pass too. A tensor counts as alive as long as its storage holds bytes, so that a parameter
    that FSDP has emptied no longer counts.

    Args:
        held: What this rank holds already, such as `model.parameters()` of a sharded model. It counts
            among all tensors from the start.
        device: Count only what is alive on this type of device, such as the GPU without the copies that
            were offloaded to the CPU. Default: all devices together.

    Attributes:
        all_gathers, reduce_scatters: Number of such collectives.
        gathered_bytes: Bytes that the all-gathers produced, padding included.
        whole_bytes: After each operation, bytes of gathered parameters that were alive.
        gather_bytes: The same with the buffers of all-gathers. FSDP2 copies each parameter out of such a
            buffer and keeps the buffer until the next unit was gathered.
        held_bytes: Bytes of what was held already.
        tensor_bytes: After each operation, bytes of tensors of any kind that were alive: shards, gathered
            parameters, buffers of collectives, gradients, activations. Differs a little from run to run
            where ranks talk, because gloo's threads let go of a buffer some time after the collective.

    Example::

        with Meter(model.parameters()) as meter:
            model(**batch).loss.backward()
        print(meter.all_gathers, meter.peak_whole_bytes)
    """

    def __init__(self, held: Iterable[Tensor] = (), *, device: torch.device | str | None = None) -> None:
        super().__init__()
        self.all_gathers = 0
        self.reduce_scatters = 0
        self.gathered_bytes = 0
        self.whole_bytes: list[int] = []
        self.gather_bytes: list[int] = []
        self.tensor_bytes: list[int] = []
        kind = None if device is None else torch.device(device).type
        self._whole = _Storages(kind)
        self._buffers = _Storages(kind)
        self._others = _Storages(kind)
        for tensor in held:
            self._others.add(tensor)
        self.held_bytes = self._others.nbytes()

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
            gathered = list(_tensors(args[0] if name.startswith("c10d") else result))
            self.all_gathers += 1
            self.gathered_bytes += sum(tensor.nbytes for tensor in gathered)
            self._hold_whole(gathered)
        elif name == COPY_OUT:
            self._whole.discard(args[0])  # from here on the copies are the parameters
            self._buffers.add(args[0])
            self._hold_whole(kwargs["out"])
        else:
            self.reduce_scatters += name in REDUCE_SCATTERS
            for tensor in _tensors((result, kwargs.get("out"))):
                if tensor not in self._whole and tensor not in self._buffers:
                    self._others.add(tensor)
        self.whole_bytes.append(self._whole.nbytes())
        self.gather_bytes.append(self.whole_bytes[-1] + self._buffers.nbytes())
        self.tensor_bytes.append(self.gather_bytes[-1] + self._others.nbytes())
        return result

    def _hold_whole(self, tensors: list[Tensor]) -> None:
        for tensor in tensors:
            self._others.discard(tensor)
            self._buffers.discard(tensor)
            self._whole.add(tensor)


class _Storages:
    """Storages that are watched without being kept alive; those of other types of devices are left out."""

    def __init__(self, kind: str | None) -> None:
        self._kind = kind
        self._refs: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __contains__(self, tensor: Tensor) -> bool:
        return _key(tensor) in self._refs

    def add(self, tensor: Tensor) -> None:
        storage, key = _storage(tensor), _key(tensor)
        if self._kind not in (None, storage.device.type):
            return
        self._refs[key] = weakref.ref(storage, lambda _: self._refs.pop(key, None))

    def discard(self, tensor: Tensor) -> None:
        self._refs.pop(_key(tensor), None)

    def nbytes(self) -> int:
        storages = (ref() for ref in list(self._refs.values()))
        return sum(storage.nbytes() for storage in storages if storage is not None)


def _storage(tensor: Tensor) -> torch.UntypedStorage:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).untyped_storage()


def _key(tensor: Tensor) -> int:
    return storage_id(_storage(tensor))


def _tensors(tree: Any) -> Iterator[Tensor]:
    return (leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor))
