"""Where gradients are masked: a few at a time, in memory from which AdamW's kernel takes them."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fsdp_utils.child_kernel import fused_adamw, laid_out_as, row, steps_on
from fsdp_utils.child_masks import PAGE, draw, keep, keys, table, threshold

_INTEGER = {4: torch.int32, 8: torch.int64}
# Elements that are masked at once: what stays in a CPU's cache, and what a GPU is busy with for a while. With
# few parameters less, but never less than is worth a call.
_LEAST, _MOST_CPU, _MOST = 2**12, 2**20, 2**24
_FEW = 4  # gradients are masked one by one; of more, bringing them together first costs less


class Scratch:
    """The memory for gradients of one dtype on one device: of `size` bytes, if that is enough for a few."""

    def __init__(self, dtype: torch.dtype, device: torch.device, size: int, page: int) -> None:
        # Gradients of two bytes are masked in fp32: the numbers have four bytes at least.
        self.wide = torch.float32 if dtype.itemsize == 2 else dtype
        self.narrows = self.wide != dtype
        integer = _INTEGER[self.wide.itemsize]
        widens = integer != torch.int32
        per_element = 4 + self.wide.itemsize * (1 + widens) + dtype.itemsize * self.narrows
        most = _MOST_CPU if device.type == "cpu" else _MOST
        self.capacity = min(max((size - 4 * page) // per_element, _LEAST), most)

        def empty(dtype: torch.dtype) -> Tensor:
            return torch.empty(self.capacity, dtype=dtype, device=device)

        self.table = table(page, device)
        self.numbers = empty(torch.int32)
        self.bits = empty(integer) if widens else self.numbers
        self.gathered = empty(self.wide)  # many small gradients, or gradients that are to be widened
        self.masked = self.bits.view(self.wide)
        self.out = empty(dtype) if self.narrows else self.masked


@dataclass
class _Item:
    """Elements [start, stop) of a parameter's local part."""

    index: int  # which parameter
    start: int
    stop: int
    whole: bool  # all there are, and in the parameter's shape
    # the scratch memory for their gradient, for the mask's numbers, and for what is kept of the gradient
    before: Tensor
    numbers: Tensor
    after: Tensor


@dataclass
class _Run:
    """Elements that follow each other within a page."""

    page: int
    first: int  # of the table
    stop: int
    at: int  # of the scratch memory


@dataclass
class _Batch:
    """What passes through the scratch memory at once."""

    items: list[_Item]
    runs: list[_Run]
    n: int


class Plan:
    """The order in which the elements of some parameters, alike in dtype and device, are masked.

    Args:
        chosen: their positions in the lists that `run` gets.
        parts: these lists' local tensors.
        first: for each of the chosen, the number of its first element among those of the model.
        scratch: the memory.
    """

    def __init__(
        self,
        chosen: list[int],
        parts: list[Tensor],
        first: list[int],
        scratch: Scratch,
    ) -> None:
        self.device = parts[chosen[0]].device
        self._scratch = scratch
        self._batches: list[_Batch] = []
        for index, number in zip(chosen, first, strict=True):
            part, start = parts[index], 0
            while start < part.numel():
                if not self._batches or self._batches[-1].n == scratch.capacity:
                    self._batches.append(_Batch([], [], 0))
                batch = self._batches[-1]
                stop = min(part.numel(), start + scratch.capacity - batch.n)
                whole = stop - start == part.numel() and part.is_contiguous()
                before, numbers, after = (
                    memory[batch.n : batch.n + stop - start].view(part.shape if whole else (-1,))
                    for memory in (scratch.gathered, scratch.bits, scratch.out)
                )
                batch.items.append(_Item(index, start, stop, whole, before, numbers, after))
                _add_runs(batch, number + start, number + stop)
                batch.n += stop - start
                start = stop

    def run(
        self,
        group: dict[str, Any],
        tensors: tuple[list[Tensor], list[Tensor], list[Tensor], list[Tensor]],
        steps: list[Tensor],
    ) -> None:
        """One step of AdamW with masked gradients.

        Args:
            group: with AdamW's settings and those of child tuning.
            tensors: parameters, gradients and both moments; local ones.
            steps: for each parameter how many steps it has taken, with this one.
        """
        params, grads, exp_avgs, exp_avg_sqs = tensors
        scratch = self._scratch
        bound, kept = threshold(group["reserve_p"])
        divisor = torch.tensor(kept, device=self.device)
        steps = steps_on(self.device, steps)
        grads = laid_out_as(params, grads)
        for batch in self._batches:
            weights, gradients, moments, squares = (
                [t[i.index] if i.whole else row(t[i.index])[i.start : i.stop] for i in batch.items]
                for t in (params, grads, exp_avgs, exp_avg_sqs)
            )
            self._draw(batch, group["seed"], group["mask_step"])
            self._keep(batch, gradients, bound)
            if scratch.narrows:
                scratch.out[: batch.n].copy_(scratch.masked[: batch.n])
            masked = [item.after for item in batch.items]
            at = [steps[item.index] for item in batch.items]
            fused_adamw(group, (weights, masked, moments, squares), at, group["weight_decay"], divisor)

    def _draw(self, batch: _Batch, seed: int, step: int) -> None:
        """Random numbers into the scratch memory."""
        scratch = self._scratch
        drawn = [keys(seed, step, run.page) for run in batch.runs]
        k1s = torch.tensor([k1 for k1, _ in drawn], dtype=torch.int32).to(self.device)
        for run, k1, (_, k2) in zip(batch.runs, k1s.unbind(), drawn, strict=True):
            entries = scratch.table[run.first : run.stop]
            draw(scratch.numbers[run.at : run.at + entries.numel()], entries, k1, k2)
        if scratch.bits is not scratch.numbers:
            scratch.bits[: batch.n].copy_(scratch.numbers[: batch.n])

    def _keep(self, batch: _Batch, gradients: list[Tensor], bound: int) -> None:
        """The gradients into the scratch memory, where the number there is greater than bound; else 0."""
        scratch = self._scratch
        if scratch.narrows or len(gradients) > _FEW:
            torch._foreach_copy_([item.before for item in batch.items], gradients)
            numbers = scratch.bits[: batch.n]
            keep(scratch.gathered[: batch.n].view(numbers.dtype), numbers, bound)
            return
        for item, gradient in zip(batch.items, gradients, strict=True):
            keep(gradient.view(item.numbers.dtype), item.numbers, bound)


def _add_runs(batch: _Batch, first: int, stop: int) -> None:
    """The model's elements [first, stop) come to the end of what the batch holds."""
    for run in _by_page(first, stop, batch.n):
        last = batch.runs[-1] if batch.runs else None
        if last and (last.page, last.stop, last.at + last.stop - last.first) == (run.page, run.first, run.at):
            last.stop = run.stop
        else:
            batch.runs.append(run)


def _by_page(first: int, stop: int, at: int) -> Iterator[_Run]:
    while first < stop:
        page, entry = divmod(first, PAGE)
        n = min(stop - first, PAGE - entry)
        yield _Run(page, entry, entry + n, at)
        first, at = first + n, at + n
