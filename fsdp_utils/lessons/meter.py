"""A meter of a training step: collectives, bytes gathered, and the peak of gathered parameters."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from fsdp_utils.allocator.trace import Recorder, storages_of
from fsdp_utils.torch_internals.runtime import storage_id

# The names under which FSDP1, FSDP2, plain torch.distributed calls and functional collectives (those of
# DTensor) reach the dispatcher.
ALL_GATHERS = {"c10d::allgather_", "c10d::_allgather_base_", "_c10d_functional::all_gather_into_tensor"}
REDUCE_SCATTERS = {
    "c10d::reduce_scatter_",
    "c10d::_reduce_scatter_base_",
    "_c10d_functional::reduce_scatter_tensor",
}
COPY_OUT = "fsdp::split_with_sizes_copy"  # FSDP2 copies each parameter out of the gathered buffer


class Meter(Recorder):
    """Counts, on this rank, what a training step gathers, and how much of it is alive at once.

    Every operation inside of the `with` block passes through it, those of the backward pass too. A tensor
    counts as long as its storage holds bytes: a parameter that FSDP has emptied no longer counts.

    Args:
        held: Tensors that this rank holds already, such as `model.parameters()` of a sharded model.
        device: Count only what is alive on this type of device. Default: all devices together.

    Example::

        with Meter(model.parameters()) as meter:
            model(**batch).loss.backward()
        print(meter.all_gathers, meter.peak_whole_bytes)
    """

    def __init__(self, held: Iterable[Tensor] = (), *, device: torch.device | str | None = None) -> None:
        super().__init__(None if device is None else torch.device(device).type)
        self.all_gathers = self.reduce_scatters = self.gathered_bytes = 0  # the last with padding
        # After each operation, bytes that were alive: of gathered parameters; the same with the buffers of
        # all-gathers, which FSDP2 keeps until the next unit was gathered; of all tensors, which differ a
        # little from run to run, because gloo's threads free a buffer some time after the collective.
        self.whole_bytes: list[int] = []
        self.gather_bytes: list[int] = []
        self.tensor_bytes: list[int] = []
        self._kinds: dict[int, str] = {}  # by storage_id: "whole" or "buffer"; others are not in it
        for tensor in held:
            self.observe(tensor, "held")
        self.held_bytes = self._alive("other")

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

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if result is NotImplemented:
            return result
        name = func.name()
        if name in ALL_GATHERS:
            gathered = tree_leaves(args[0] if name.startswith("c10d") else result)
            self.all_gathers += 1
            self.gathered_bytes += sum(tensor.nbytes for tensor in gathered)
            self._mark(gathered, "whole")
        elif name == COPY_OUT:  # from here on the copies are the parameters
            self._mark([args[0]], "buffer")
            self._mark(kwargs["out"], "whole")
        self.reduce_scatters += name in REDUCE_SCATTERS
        self.whole_bytes.append(self._alive("whole"))
        self.gather_bytes.append(self.whole_bytes[-1] + self._alive("buffer"))
        self.tensor_bytes.append(self.gather_bytes[-1] + self._alive("other"))
        return result

    def _free(self, key: int) -> None:
        super()._free(key)
        self._kinds.pop(key, None)  # FSDP2 refills a parameter's storage before it copies into it

    def _mark(self, tensors: Iterable[Tensor], kind: str) -> None:
        for tensor in tensors:
            self.observe(tensor, kind)
            self._kinds.update((storage_id(storage), kind) for storage in storages_of(tensor))

    def _alive(self, kind: str) -> int:
        # a list: one of gloo's threads may free a tensor meanwhile
        return sum(e.size for key, e in list(self.allocated.items()) if self._kinds.get(key, "other") == kind)
