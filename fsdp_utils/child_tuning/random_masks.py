"""Random masks that are a function of seed, step and place, at the price of one multiplication per element.

All elements of all parameters are numbered in one row, as if nothing were sharded. The row is cut into
pages. Element i of a page draws the 32-bit number `k1 + k2 * TABLE[i]` (mod 2^32), where TABLE is fixed and
k1 and k2 are hashes of seed, step and page: multiplicative hashing (Dietzfelbinger et al. 1997), under which
each number is uniform and, nearly, any two are independent. An element is kept where its number is among the
largest fraction p. There is no generator whose state could depend on which rank draws or holds what.
"""

import struct
from collections.abc import Iterator

import torch
from torch import Tensor

from fsdp_utils.torch_internals.names import foreach_copy_

PAGE = 2**16  # elements
# Elements that are masked at once, unless one parameter has more. On a CPU they stay in its cache; on a GPU
# they keep it busy while the next ones are issued, and 32 MiB of fp32 stay in the L2 cache of an H100.
_MOST = {"cpu": 2**20, "gpu": 2**22}
_BITS64 = 2**64 - 1
_GAMMA = 0x9E3779B97F4A7C15
_FACTORS = (30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)


def threshold(p: float) -> tuple[int, float]:
    """Return the number above which an element is kept, and the fraction that this keeps.

    The fraction is p as fp32 has it, so that fp32 can divide by exactly what is kept.
    """
    if not 0 < p <= 1:
        raise ValueError(f"ChildTuningAdamW: expected reserve_p in (0, 1], found {p}")
    (p,) = struct.unpack("f", struct.pack("f", p))
    kept = min(max(round(p * 2**32), 1), 2**32 - 2**8)
    return 2**31 - 1 - kept, kept / 2**32


class MaskedGradients:
    """Masks gradients of one dtype and device, batch by batch, in memory that it keeps.

    Args:
        parts: this rank's parts of the parameters.
        firsts: for each the number of its first element among those of the model.
    """

    def __init__(self, parts: list[Tensor], firsts: list[int]) -> None:
        dtype, device, sizes = parts[0].dtype, parts[0].device, [part.numel() for part in parts]
        most = min(_MOST["cpu"], sum(sizes) // 16) if device.type == "cpu" else _MOST["gpu"]
        self.batches: list[list[int]] = [[0]]
        for i in range(1, len(parts)):
            if sum(sizes[j] for j in self.batches[-1]) + sizes[i] > most:
                self.batches.append([])
            self.batches[-1].append(i)
        largest = max(sum(sizes[i] for i in batch) for batch in self.batches)

        def memory(dtype: torch.dtype) -> Tensor:
            return torch.empty(largest, dtype=dtype, device=device)

        # Gradients of two bytes are masked in fp32: the numbers have four bytes at least.
        wide = torch.float32 if dtype.itemsize == 2 else dtype
        numbers = memory(torch.int32)
        bits = numbers if wide.itemsize == 4 else memory(torch.int64)
        masked = bits.view(wide)
        out = masked if dtype == wide else memory(dtype)
        # One large parameter at a time is read where it lies; bringing several together first is faster.
        self._alone = dtype == wide and len(self.batches) == len(parts)
        gathered = masked if self._alone else memory(wide)
        entries, pages = _table(device), list[int]()
        self._plan = []
        for batch in self.batches:
            draws, at = [], 0
            for these, part in _page_runs([(firsts[i], firsts[i] + sizes[i]) for i in batch]):
                n = len(these) * (part.stop - part.start)
                draws.append((numbers[at : at + n].view(len(these), -1), entries[part]))
                pages += these
                at += n
            pieces = [
                [piece.view(parts[i].shape) for i, piece in zip(batch, each, strict=True)]
                for each in (t[:at].split([sizes[i] for i in batch]) for t in (gathered, bits, out))
            ]
            whole = [each[:at] for each in (numbers, bits, gathered.view(bits.dtype), masked, out)]
            self._plan.append((draws, whole, pieces))
        self._pages = torch.tensor(pages, dtype=torch.int64, device=device)
        self._rows = [len(drawn) for draws, _, _ in self._plan for drawn, _ in draws]

    def of(self, grads: list[Tensor], *, seed: int, step: int, bound: int) -> Iterator[list[Tensor]]:
        """Yield the masked gradients of each of self.batches: valid until the next, and may be overwritten.

        Args:
            grads: the gradients of the local parts.
            seed, step: what the masks are a function of.
            bound: numbers greater than this one are kept.
        """
        k1, k2 = _keys(self._pages, seed, step)
        keys = zip(k1.split(self._rows), k2.split(self._rows), strict=True)
        for batch, plan in zip(self.batches, self._plan, strict=True):
            draws, (numbers, bits, source, masked, out), (before, own_bits, after) = plan
            for (drawn, entries), (own_k1, own_k2) in zip(draws, keys, strict=False):
                if drawn.device.type == "cpu":  # where the kernel of addcmul takes one element at a time
                    torch.mul(entries, own_k2, out=drawn).add_(own_k1)
                else:
                    torch.addcmul(own_k1, own_k2, entries, out=drawn)
            if bits.dtype != numbers.dtype:
                bits.copy_(numbers)
            if self._alone:
                source, bits = grads[batch[0]].to(masked.dtype).contiguous().view(bits.dtype), own_bits[0]
            else:
                foreach_copy_(before, [grads[i] for i in batch])
            torch.ops.aten.threshold_backward.grad_input(source, bits, bound, grad_input=bits)
            if out.dtype != masked.dtype:
                out.copy_(masked)
            yield after


def _page_runs(parts: list[tuple[int, int]]) -> Iterator[tuple[range, slice]]:
    """Cut the elements [first, stop) of the parts where pages begin: pages, and each one's part of the table.

    Parts that follow each other are cut as one, and whole pages that follow each other are one run.
    """
    merged: list[list[int]] = []
    for first, stop in parts:
        if merged and merged[-1][1] == first:
            merged[-1][1] = stop
        else:
            merged.append([first, stop])
    for first, stop in merged:
        while first < stop:
            page, entry = divmod(first, PAGE)
            pages = 1 if entry else max(1, (stop - first) // PAGE)
            end = min(PAGE, entry + stop - first)
            yield range(page, page + pages), slice(entry, end)
            first += pages * (end - entry)


def _table(device: torch.device) -> Tensor:
    """Return the fixed random numbers of a page, int32."""
    z = torch.arange(1, PAGE + 1, dtype=torch.int64, device=device) * _signed(_GAMMA)
    for shift, factor in _FACTORS:
        z = (z ^ (z >> shift)) * _signed(factor)
    return (z ^ (z >> 31)).to(torch.int32)


def _keys(pages: Tensor, seed: int, step: int) -> tuple[Tensor, Tensor]:
    """Compute k1 and k2 (odd) of the pages, a column each, int32, on their device: no GPU has to wait."""
    z = pages ^ _signed(_mix(_mix(seed & _BITS64) ^ step))
    z += _signed(_GAMMA)
    for shift, factor in _FACTORS:
        z ^= (z >> shift) & (_BITS64 >> shift)  # a shift of int64 repeats the sign
        z *= _signed(factor)
    z ^= (z >> 31) & (_BITS64 >> 31)
    k1, k2 = z.view(torch.int32).view(-1, 2).split(1, dim=1)  # the lower half comes first in memory
    return k1, k2.bitwise_or_(1)


def _mix(z: int) -> int:
    """Splitmix64's finalizer (Steele, Lea and Flood 2014)."""
    z = z + _GAMMA & _BITS64
    for shift, factor in _FACTORS:
        z = (z ^ z >> shift) * factor & _BITS64
    return z ^ z >> 31


def _signed(value: int) -> int:
    """The int64 of the same 64 bits."""
    return value - (value >> 63 << 64)
