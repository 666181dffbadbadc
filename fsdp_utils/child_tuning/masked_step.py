"""A step with masked gradients: a few at a time, in scratch memory from which AdamW's kernel reads."""

from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from fsdp_utils.child_tuning.fused_kernel import fused_adamw, steps_on
from fsdp_utils.child_tuning.random_masks import PAGE, draw, keep, keys, table, threshold
from fsdp_utils.torch_internals.names import foreach_copy_

_INTEGER = {4: torch.int32, 8: torch.int64}
# Elements that are masked at once. On a CPU what stays in its cache, at most; with few parameters less, but
# never less than is worth a call. On a GPU enough to be busy with while the next ones are issued, and so few
# that the scratch memory (32 MiB of fp32) stays in the L2 cache of an H100.
_LEAST_CPU, _MOST_CPU, _GPU = 2**12, 2**20, 2**22
_FEW = 2  # gradients are masked one by one; of more, bringing them together first costs less


class Scratch:
    """The memory for gradients of one dtype on one device.

    Args:
        dtype: of the gradients.
        device: where they are.
        size: on a CPU, the bytes that the memory may take, if that is enough for a few gradients.
        elements: of all parameters of the model.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device, size: int, elements: int) -> None:
        # Gradients of two bytes are masked in fp32: the numbers have four bytes at least.
        self.wide = torch.float32 if dtype.itemsize == 2 else dtype
        self.narrows = self.wide != dtype
        integer = _INTEGER[self.wide.itemsize]
        widens = integer != torch.int32
        page = min(PAGE, elements)
        per_element = 4 + self.wide.itemsize * (1 + widens) + dtype.itemsize * self.narrows
        if device.type == "cpu":
            self.capacity = min(max((size - 4 * page) // per_element, _LEAST_CPU), _MOST_CPU)
        else:
            self.capacity = min(elements, _GPU)
        if self.capacity > PAGE:
            self.capacity -= self.capacity % PAGE  # whole pages are drawn together

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

    @property
    def is_page(self) -> bool:
        return self.stop - self.first == PAGE


class _Batch:
    """What passes through the scratch memory at once."""

    def __init__(self) -> None:
        self.items: list[_Item] = []
        self.runs: list[_Run] = []
        self.n = 0

    def close(self, scratch: Scratch) -> None:
        """All items are there: make the views of the scratch memory that each step needs."""
        # What is drawn at once, elements that follow each other in a page or several whole pages: their
        # numbers, a row for each page, and the entries of the table.
        self.drawn: list[tuple[Tensor, Tensor]] = []
        for is_page, runs in groupby(self.runs, lambda run: run.is_page):
            for group in [list(runs)] if is_page else [[run] for run in runs]:
                first, stop, at = group[0].first, group[0].stop, group[0].at
                numbers = scratch.numbers[at : at + len(group) * (stop - first)].view(len(group), -1)
                self.drawn.append((numbers, scratch.table[first:stop]))
        self.numbers, self.bits, self.gathered, self.masked, self.out = (
            memory[: self.n]
            for memory in (scratch.numbers, scratch.bits, scratch.gathered, scratch.masked, scratch.out)
        )
        self.gathered_bits = self.gathered.view(self.bits.dtype)


class Plan:
    """The order in which the elements of some parameters, alike in dtype and device, are masked.

    Args:
        chosen: their positions in the lists that `run` gets.
        parts: these lists' local tensors.
        first: for each of the chosen, the number of its first element among those of the model.
        scratch: the memory.
    """

    def __init__(self, chosen: list[int], parts: list[Tensor], first: list[int], scratch: Scratch) -> None:
        self.device = parts[chosen[0]].device
        self._chosen, self._scratch = chosen, scratch
        self._batches: list[_Batch] = []
        for index, number in zip(chosen, first, strict=True):
            part, start = parts[index], 0
            while start < part.numel():
                if not self._batches or self._batches[-1].n == scratch.capacity:
                    self._batches.append(_Batch())
                batch = self._batches[-1]
                stop = min(part.numel(), start + scratch.capacity - batch.n)
                whole = stop - start == part.numel()
                before, numbers, after = (
                    memory[batch.n : batch.n + stop - start].view(part.shape if whole else (-1,))
                    for memory in (scratch.gathered, scratch.bits, scratch.out)
                )
                batch.items.append(_Item(index, start, stop, whole, before, numbers, after))
                _add_runs(batch, number + start, number + stop)
                batch.n += stop - start
                start = stop
        for batch in self._batches:
            batch.close(scratch)
        pages = [run.page for batch in self._batches for run in batch.runs]
        self._pages = torch.tensor(pages, dtype=torch.int64, device=self.device)
        self._rows = [len(numbers) for batch in self._batches for numbers, _ in batch.drawn]

    def run(
        self,
        group: dict[str, Any],
        tensors: tuple[list[Tensor], list[Tensor], list[Tensor], list[Tensor]],
        steps: list[Tensor],
    ) -> None:
        """One step of AdamW with masked gradients.

        Args:
            group: with AdamW's settings and those of child tuning.
            tensors: parameters, gradients and both moments; local ones, and alike in memory.
            steps: for each parameter how many steps it has taken, with this one.
        """
        params, _, exp_avgs, exp_avg_sqs = tensors
        # Elements are numbered as in a contiguous tensor: those of another memory format are copied into one.
        used = [{i: column[i].contiguous() for i in self._chosen} for column in tensors]
        bound, kept = threshold(group["reserve_p"])
        divisor = torch.full((), kept, dtype=torch.float32, device=self.device)
        steps = steps_on(self.device, steps)
        k1, k2 = keys(self._pages, group["seed"], group["mask_step"])
        of_draws = zip(k1.split(self._rows), k2.split(self._rows), strict=True)
        for batch in self._batches:
            weights, gradients, moments, squares = (
                [t[i.index] if i.whole else t[i.index].view(-1)[i.start : i.stop] for i in batch.items]
                for t in used
            )
            for (numbers, entries), (own_k1, own_k2) in zip(batch.drawn, of_draws, strict=False):
                draw(numbers, entries, own_k1, own_k2)
            if batch.bits.dtype != batch.numbers.dtype:
                batch.bits.copy_(batch.numbers)
            self._keep(batch, gradients, bound)
            if self._scratch.narrows:
                batch.out.copy_(batch.masked)
            masked = [item.after for item in batch.items]
            at = [steps[item.index] for item in batch.items]
            fused_adamw(group, (weights, masked, moments, squares), at, group["weight_decay"], divisor)
        for i in self._chosen:
            if not params[i].is_contiguous():
                for column, copies in ((params, used[0]), (exp_avgs, used[2]), (exp_avg_sqs, used[3])):
                    column[i].copy_(copies[i])

    def _keep(self, batch: _Batch, gradients: list[Tensor], bound: int) -> None:
        """The gradients into the scratch memory, where the number there is greater than bound; else 0."""
        if self._scratch.narrows or len(gradients) > _FEW:
            foreach_copy_([item.before for item in batch.items], gradients)
            keep(batch.gathered_bits, batch.bits, bound)
            return
        for item, gradient in zip(batch.items, gradients, strict=True):
            keep(gradient.view(item.numbers.dtype), item.numbers, bound)


def _add_runs(batch: _Batch, first: int, stop: int) -> None:
    """The model's elements [first, stop) come to the end of what the batch holds."""
    at = batch.n
    while first < stop:
        page, entry = divmod(first, PAGE)
        n = min(stop - first, PAGE - entry)
        last = batch.runs[-1] if batch.runs else None
        if last and (last.page, last.stop, last.at + last.stop - last.first) == (page, entry, at):
            last.stop += n
        else:
            batch.runs.append(_Run(page, entry, entry + n, at))
        first, at = first + n, at + n
