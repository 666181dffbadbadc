"""Record what one rank allocates, computes and sends, and for which unit and purpose."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from fsdp_utils.allocator.trace import AllocationEvent, Recorder
from fsdp_utils.collectives.c10d_hooks import Call, listen_to_calls
from fsdp_utils.collectives.fsdp_hooks import Listener, in_backward, listen
from fsdp_utils.planner import work_items
from fsdp_utils.planner.work_items import Alloc, Begin, Free, Gone, Label, Recording, Send, Work
from fsdp_utils.sharding.units import ROOT, Unit, find_units
from fsdp_utils.torch_internals.fsdp import fsdp1_dtypes, fsdp2_whole
from fsdp_utils.torch_internals.runtime import storage_id

aten = torch.ops.aten
# what the CPU computes attention with, in the place of the GPU's flash attention
_CPU_ATTENTION = {
    aten._scaled_dot_product_flash_attention_for_cpu: lambda q, k, v, *_: sdpa_flop_count(
        q.shape, k.shape, v.shape
    ),
    aten._scaled_dot_product_flash_attention_for_cpu_backward: lambda grad, q, k, v, *_: (
        sdpa_backward_flop_count(grad.shape, q.shape, k.shape, v.shape)
    ),
}
# Parts of the names of torch's operators that multiply matrices; all its others do not.
_MULTIPLY = ("mm", "mv", "dist", "trilinear", "solve", "rnn", "attention", "conv")
_OVERWRITES = {"copy_", "fill_", "zero_", "_foreach_copy_"}  # whatever was there
_EMPTY = {"empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided"}
_FREE_OF_WORK = {*_EMPTY, "detach", "resize_"}


class StepRecorder(Recorder, Listener):
    """Records items with labels: what the dispatcher, the collectives and FSDP's hooks tell."""

    def __init__(self, units: Iterable[Unit], ranks_per_host: int) -> None:
        super().__init__("cpu")
        self.recording: Recording = []
        self.category: dict[int, str] = {}  # by block; what is learned later is put in at the end
        self._units = {unit.name: unit for unit in units}
        self._whole_bytes = {unit.name: _whole_bytes(unit) for unit in self._units.values() if unit.fsdp1}
        self._ranks_per_host = ranks_per_host
        self.label = Label("start")
        self._unit_of_block: dict[int, str] = {}
        self._working_for: list[str] = []
        self._between_steps = True  # no unit has computed yet, or all have
        self._ended = False  # the present unit has computed; FSDP may still have to work for it
        self._reducing = False

    def phase(self, phase: str) -> None:
        self.label = Label(phase)
        self._ended = self._reducing = False
        self._between_steps = phase in ("forward", "other")

    def begin_batch(self, micro_batch: int) -> None:
        self.phase("forward")
        self._add(Begin(micro_batch))

    def now_for(self, tensors: Iterable[Any], category: str) -> None:
        """Give these tensors another category, now that their purpose is known."""
        for tensor in tensors:
            if isinstance(tensor, torch.Tensor) and (block := self._block_of(tensor)) is not None:
                self.category[block] = category

    def finished(self) -> Recording:
        """Return the recording, each block in its last category."""
        for _, items in self.recording:
            for n, item in enumerate(items):
                if isinstance(item, Alloc):
                    items[n] = item._replace(category=self.category[item.block])
        return self.recording

    def enter(self, unit: str) -> None:
        if not self._working_for:
            self.label = Label("backward" if in_backward() else "forward", unit)
        self._working_for.append(unit)

    def leave(self, unit: str) -> None:
        if unit in self._working_for:
            self._working_for.remove(unit)
        if not self._working_for and self._ended:
            # what follows is the model's own, until the next unit begins
            self.label, self._ended, self._reducing = Label(self.label.phase), False, False

    def begin(self, module: str, phase: str) -> None:
        if phase in ("forward", "backward"):
            self._between_steps = False
            self.label, self._ended = Label("backward" if in_backward() else "forward", module), False

    def end(self, module: str, phase: str) -> None:
        self._ended = True
        if phase == "backward" and module in self._units:
            self._reducing = True
            self._between_steps = module == ROOT
            self.now_for(_whole_gradients(self._units[module]), work_items.WHOLE_GRADIENTS)

    def freed(self, unit: str) -> None:
        self._add(Gone(unit))

    def collective(self, call: Call, issue: Callable[[], Any]) -> Any:
        ranks = dist.get_process_group_ranks(call.group)
        here = sum(rank // self._ranks_per_host == ranks[0] // self._ranks_per_host for rank in ranks)
        unit = self._working_for[-1] if self._working_for else ROOT
        self._add(Send(call.kind, unit, max(call.bytes_in, call.bytes_out), len(ranks), here))
        return issue()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "prim":
            return func(*args, **(kwargs or {}))
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        kwargs = kwargs or {}
        if self.label.phase == "optimizer" and not self.muted:
            self.label = Label("optimizer", self._unit_of(args, kwargs))
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if func.namespace not in ("c10d", "_c10d_functional", "profiler") and not (
            self.muted or func.is_view or func.overloadpacket.__name__ in _FREE_OF_WORK
        ):
            self._work(func, args, kwargs, result)
        return result

    def note(self, event: AllocationEvent) -> None:
        if event.kind == "free":
            self._add(Free(event.block), unit=self._unit_of_block.get(event.block))
            return
        self._unit_of_block[event.block] = self.label.unit
        self.category[event.block] = self._guess(event)
        self._add(Alloc(event.block, event.size, event.stream, ""))

    def _guess(self, event: AllocationEvent) -> str:
        """Tell the category of a tensor by when it was made."""
        if self._working_for:
            if self._reducing:
                return work_items.REDUCE_BUFFERS
            unit = self._units.get(self._working_for[-1])
            if unit is None:
                # a root without parameters: FSDP gathers nothing for it, it casts the inputs
                return work_items.ACTIVATIONS
            # FSDP1 gathers from the rank's shard, in the dtype of computation
            whole = event.size >= self._whole_bytes[unit.name] if unit.fsdp1 else event.stream == 0
            return work_items.GATHERED if whole else work_items.GATHER_BUFFERS
        # in backward, gradients are enabled where a checkpoint computes again
        temporary = self.label.phase == "optimizer" or (in_backward() and not torch.is_grad_enabled())
        return work_items.TEMPORARIES if temporary else work_items.ACTIVATIONS

    def _work(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        packet = func.overloadpacket
        flop = masked = 0
        if packet in flop_registry:
            flop = int(flop_registry[packet](*args, **kwargs, out_val=result))
        elif packet in _CPU_ATTENTION:
            flop = int(_CPU_ATTENTION[packet](*args))
            is_causal = any(arg is True for arg in args)  # the only bool among them
            masked = flop // 2 if is_causal else 0
        elif packet is aten._grouped_mm:
            # the groups divide the rows, the columns or the sum: all rows are multiplied in either case
            one, other = args[:2]
            flop = 2 * min(one.numel() * other.shape[-1], one.shape[-2] * other.numel())
        given, made = _tensors((args, kwargs)), _tensors(result)
        read = given
        if packet is aten.embedding:
            read = made  # as many rows as it writes
        elif packet.__name__ == "all_gather_copy_in":
            read = made = list(args[0])  # it fills this rank's part of a buffer for all
        elif packet.__name__ in _OVERWRITES:
            written = {storage_id(leaf.untyped_storage()) for leaf in made}
            read = [leaf for leaf in given if storage_id(leaf.untyped_storage()) not in written]
        if nbytes := sum(map(_nbytes, read)) + sum(map(_nbytes, made)):
            half = next((t.element_size() == 2 for t in given if t.is_floating_point()), False)
            alarm = not flop and self.label.phase == "forward" and _may_multiply(func, given, made)
            again = in_backward() and torch.is_grad_enabled()
            kind = packet in _CPU_ATTENTION, again, str(packet) if alarm else ""
            self._add(Work(flop, masked, half, nbytes, self._stream_number(), *kind))

    def _unit_of(self, args: Any, kwargs: Any) -> str:
        """The unit whose parameters an operation of the optimizer updates; ROOT where several."""
        found = set()
        for leaf in _tensors((args, kwargs)):
            if leaf.numel() > 1 and (block := self._block_of(leaf)) is not None:  # not the count of steps
                found.add(self._unit_of_block.get(block, ROOT))
                if len(found) > 1:
                    return ROOT
        return found.pop() if found else self.label.unit

    def _block_of(self, tensor: torch.Tensor) -> int | None:
        event = self.allocated.get(storage_of(tensor))
        return event.block if event else None

    def _add(self, entry: Any, unit: str | None = None) -> None:
        label = self.label
        # before the first unit and after the last, what is freed tells to which unit it belonged: gradients,
        # for example, are freed in a row
        if unit is not None and self._between_steps:
            label = Label(label.phase, unit)
        if not self.recording or self.recording[-1][0] != label or isinstance(entry, Begin):
            self.recording.append((label, []))
        self.recording[-1][1].append(entry)


@contextmanager
def recording_steps(model: nn.Module, ranks_per_host: int) -> Iterator[StepRecorder]:
    """Record the steps inside, of a sharded model."""
    units = find_units(model)
    recorder = StepRecorder(units, ranks_per_host)
    with recorder, listen_to_calls(recorder.collective), listen(model, units, recorder):
        yield recorder


def _may_multiply(func: Any, given: list[torch.Tensor], made: list[torch.Tensor]) -> bool:
    """Whether an operator without a formula may be a product of matrices."""
    matrices = [tensor for tensor in given if tensor.is_floating_point() and tensor.ndim > 1]
    if len(matrices) < 2 or not any(tensor.ndim > 1 for tensor in made):
        return False
    if func.namespace == "aten":
        return any(part in func.overloadpacket.__name__ for part in _MULTIPLY)
    return func.namespace != "fsdp"


def storage_of(tensor: torch.Tensor) -> int:
    """Identify the storage of a tensor, or of a DTensor's shard."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return storage_id(local.untyped_storage())


def _tensors(values: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]


def _nbytes(tensor: torch.Tensor) -> int:
    # an expanded tensor has more elements than memory
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


def _whole_bytes(unit: Unit) -> int:
    at_rest, computing = fsdp1_dtypes(unit.parts[0])
    return unit.nbytes // at_rest.itemsize * computing.itemsize


def _whole_gradients(unit: Unit) -> Iterator[Any]:
    for part in unit.parts:
        if unit.fsdp1:
            yield part.flat_param.grad
            continue
        for parameter in part.fsdp_params:
            whole = fsdp2_whole(parameter)
            yield whole.grad if whole is not None else None
            yield vars(parameter).get("unsharded_accumulated_grad")  # in torch 2.15 it is the same
