"""Mask gradients at random, some parameters at a time, in scratch memory from which AdamW's kernel reads."""

from collections.abc import Iterator

import torch
from torch import Tensor

from fsdp_utils.child_tuning.random_masks import draw, keep, keys, page_runs, table
from fsdp_utils.torch_internals.names import foreach_copy_

# Elements that are masked at once, if no parameter has more. On a CPU what stays in its cache, at most; with
# few parameters a sixteenth. On a GPU enough to be busy with while the next ones are issued, and so few that
# the scratch memory (32 MiB of fp32) stays in the L2 cache of an H100.
_MOST = {"cpu": 2**20, "gpu": 2**22}
_FEW = 2  # gradients are masked one by one; for more, bringing them together first is faster


class MaskedGradients:
    """The random masks of some parameters, alike in dtype and device.

    Args:
        parts: their local parts.
        firsts: for each the number of its first element among those of the model.
    """

    def __init__(self, parts: list[Tensor], firsts: list[int]) -> None:
        dtype, device = parts[0].dtype, parts[0].device
        most = _MOST["gpu"]
        if device.type == "cpu":
            most = min(_MOST["cpu"], sum(part.numel() for part in parts) // 16)
        self.batches: list[list[int]] = [[]]
        sizes = [0]
        for i, part in enumerate(parts):
            if sizes[-1] and sizes[-1] + part.numel() > most:
                self.batches.append([])
                sizes.append(0)
            self.batches[-1].append(i)
            sizes[-1] += part.numel()

        def scratch(dtype: torch.dtype) -> Tensor:
            return torch.empty(max(sizes), dtype=dtype, device=device)

        # Gradients of two bytes are masked in fp32: the numbers have four bytes at least.
        wide = torch.float32 if dtype.itemsize == 2 else dtype
        self._gathers = dtype != wide or max(map(len, self.batches)) > _FEW
        self._numbers = scratch(torch.int32)
        self._bits = scratch(torch.int64) if wide.itemsize == 8 else self._numbers
        self._gathered = scratch(wide) if self._gathers else self._bits.view(wide)
        self._out = scratch(dtype) if dtype != wide else self._bits.view(wide)
        self._views = [
            tuple(
                _views(memory, [parts[i] for i in batch])
                for memory in (self._gathered, self._bits, self._out)
            )
            for batch in self.batches
        ]
        self._slices = [
            (
                self._bits[:n],
                self._gathered[:n].view(self._bits.dtype),
                self._bits[:n].view(wide),
                self._out[:n],
            )
            for n in sizes
        ]
        # What is drawn at once, a part of a page or several whole pages: numbers, a row per page, and entries
        # of the table.
        self._draws: list[list[tuple[Tensor, Tensor]]] = []
        entries, pages = table(device), list[int]()
        for batch in self.batches:
            runs: list[list[int]] = []  # first and last + 1 of elements that follow each other
            for i in batch:
                stop = firsts[i] + parts[i].numel()
                if runs and runs[-1][1] == firsts[i]:
                    runs[-1][1] = stop
                else:
                    runs.append([firsts[i], stop])
            drawn, at = [], 0
            for these, part in (each for run in runs for each in page_runs(*run)):
                n = len(these) * (part.stop - part.start)
                drawn.append((self._numbers[at : at + n].view(len(these), -1), entries[part]))
                pages += these
                at += n
            self._draws.append(drawn)
        self._pages = torch.tensor(pages, dtype=torch.int64, device=device)
        self._rows = [len(numbers) for drawn in self._draws for numbers, _ in drawn]

    def of(self, grads: list[Tensor], *, seed: int, step: int, bound: int) -> Iterator[list[Tensor]]:
        """Yield the masked gradients of each of self.batches: valid until the next, and may be overwritten.

        Args:
            grads: the local parts' gradients, laid out in memory as the parts.
            seed, step: what the masks are a function of.
            bound: numbers greater than this one are kept.
        """
        k1, k2 = keys(self._pages, seed, step)
        of_draws = zip(k1.split(self._rows), k2.split(self._rows), strict=True)
        batches = zip(self.batches, self._draws, self._views, self._slices, strict=True)
        for batch, drawn, (before, own, after), (bits, gathered, masked, out) in batches:
            for (numbers, entries), (own_k1, own_k2) in zip(drawn, of_draws, strict=False):
                draw(numbers, entries, own_k1, own_k2)
            if self._bits is not self._numbers:
                bits.copy_(self._numbers[: len(bits)])
            gradients = [grads[i] for i in batch]
            if self._gathers:
                foreach_copy_(before, gradients)
                keep(gathered, bits, bound)
            else:
                for gradient, numbers in zip(gradients, own, strict=True):
                    keep(gradient.view(bits.dtype), numbers, bound)
            if out.dtype != masked.dtype:
                out.copy_(masked)
            yield after


def _views(memory: Tensor, parts: list[Tensor]) -> list[Tensor]:
    """Memory for each of these, laid out as they are."""
    pieces = memory[: sum(part.numel() for part in parts)].split([part.numel() for part in parts])
    return [own.as_strided(part.shape, part.stride()) for own, part in zip(pieces, parts, strict=True)]
