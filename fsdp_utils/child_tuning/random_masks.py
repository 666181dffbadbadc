"""Random masks that are a function of seed, step and place, at the price of one multiplication per element.

All elements of the unsharded model are numbered in one row, and the row is cut into pages. Element i of a
page draws `k1 + k2 * TABLE[i]` (mod 2^32); k1 and k2 are hashes of seed, step and page: multiplicative
hashing (Dietzfelbinger et al. 1997), under which each number is uniform and, nearly, any two are
independent. The largest fraction p is kept.
"""

import struct
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from fsdp_utils.torch_internals.names import foreach_copy_

PAGE = 2**16  # elements
# Elements that are masked at once, unless one parameter has more. On a CPU they stay in its cache; on a GPU
# they keep it busy while the next ones are issued, and 32 MiB of fp32 stay in the L2 cache of an H100.
_MOST = {"cpu": 2**20, "gpu": 2**22}
_GAMMA, *_FACTORS = np.array([0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB], np.uint64)


def threshold(p: float) -> tuple[int, float]:
    """Return the number above which an element is kept, and the fraction that this keeps."""
    if not 0 < p <= 1:
        raise ValueError(f"ChildTuningAdamW: expected reserve_p in (0, 1], found {p}")
    (p,) = struct.unpack("f", struct.pack("f", p))
    kept = min(max(round(p * 2**32), 1), 2**32 - 2**8)
    return 2**31 - 1 - kept, kept / 2**32


class MaskedGradients:
    """Masks gradients of one dtype and device, batch by batch, in memory that it keeps."""

    def __init__(self, parts: list[Tensor], firsts: list[int]) -> None:
        """Plan for a rank's parts of parameters, by the number of each one's first element in the model."""
        dtype, device, sizes = parts[0].dtype, parts[0].device, [part.numel() for part in parts]
        most = min(_MOST["cpu"], sum(sizes) // 16) if device.type == "cpu" else _MOST["gpu"]
        self.batches: list[list[int]] = [[0]]
        for i in range(1, len(parts)):
            if sum(sizes[j] for j in self.batches[-1]) + sizes[i] > most:
                self.batches.append([])
            self.batches[-1].append(i)
        largest = max(sum(sizes[i] for i in batch) for batch in self.batches)
        numbers = torch.empty(largest, dtype=torch.int32, device=device)
        masked = numbers.view(dtype) if dtype == torch.float32 else numbers.new_empty(largest, dtype=dtype)
        # One large parameter at a time is read where it lies; bringing several together first is faster.
        self._alone = len(self.batches) == len(parts)
        gathered = masked if self._alone or dtype != torch.float32 else torch.empty_like(masked)
        table = _mix(np.arange(PAGE) * _GAMMA.astype(np.int64)).astype(np.int32)
        entries = torch.from_numpy(table).to(device)
        runs = [_page_runs([(firsts[i], firsts[i] + sizes[i]) for i in batch]) for batch in self.batches]
        pages = [page for of_batch in runs for these, _ in of_batch for page in these]
        self._pages = np.array(pages, np.uint64)
        self._keys = torch.empty(len(pages), 2, dtype=torch.int32, device=device)
        rows = iter(self._keys.split([len(these) for of_batch in runs for these, _ in of_batch]))
        self._plan = []
        for batch, of_batch in zip(self.batches, runs, strict=True):
            draws, at = [], 0
            for these, part in of_batch:
                n = len(these) * (part.stop - part.start)
                drawn = numbers[at : at + n].view(len(these), -1)
                draws.append((drawn, entries[part], *next(rows).split(1, dim=1)))
                at += n
            pieces = [
                [piece.view(parts[i].shape) for i, piece in zip(batch, each, strict=True)]
                for each in (t[:at].split([sizes[i] for i in batch]) for t in (gathered, masked))
            ]
            whole = numbers[:at], gathered[:at].view(dtype), masked[:at]
            self._plan.append((draws, whole, pieces))

    def of(self, grads: list[Tensor], *, seed: int, step: int, bound: int) -> Iterator[list[Tensor]]:
        """Yield the masked gradients of each of self.batches, valid until the next."""
        self._keys.copy_(torch.from_numpy(_keys(self._pages, seed, step)), non_blocking=True)
        for batch, (draws, (numbers, source, masked), (before, after)) in zip(
            self.batches, self._plan, strict=True
        ):
            for drawn, entries, k1, k2 in draws:
                if drawn.device.type == "cpu":  # where the kernel of addcmul takes one element at a time
                    torch.mul(entries, k2, out=drawn).add_(k1)
                else:
                    torch.addcmul(k1, k2, entries, out=drawn)
            if self._alone and masked.dtype == torch.float32:
                source = grads[batch[0]].to(masked.dtype).contiguous().view(-1)
            else:
                foreach_copy_(before, [grads[i] for i in batch])
            if masked.dtype == torch.float32:  # the numbers become what they let through
                bits = source.view(torch.int32)
                torch.ops.aten.threshold_backward.grad_input(bits, numbers, bound, grad_input=numbers)
            else:
                masked.masked_fill_(numbers <= bound, 0)
            yield after


def _page_runs(parts: list[tuple[int, int]]) -> list[tuple[range, slice]]:
    """Cut elements [first, stop) where pages begin: runs of pages, and each one's part of the table."""
    merged: list[list[int]] = []
    for first, stop in parts:
        if merged and merged[-1][1] == first:
            merged[-1][1] = stop
        else:
            merged.append([first, stop])
    runs = []
    for first, stop in merged:
        while first < stop:
            page, entry = divmod(first, PAGE)
            pages = 1 if entry else max(1, (stop - first) // PAGE)
            end = min(PAGE, entry + stop - first)
            runs.append((range(page, page + pages), slice(entry, end)))
            first += pages * (end - entry)
    return runs


def _keys(pages: np.ndarray, seed: int, step: int) -> np.ndarray:
    """Compute k1 and k2 (odd) of the pages, two columns of int32."""
    of_step = _mix(_mix(np.array([seed % 2**64], np.uint64)) ^ np.uint64(step))
    keys = _mix(pages ^ of_step).view(np.int32).reshape(-1, 2)
    keys[:, 1] |= 1
    return keys


def _mix(z: np.ndarray) -> np.ndarray:
    """Splitmix64's number after each state (Steele, Lea and Flood 2014); shifts of int64 repeat the sign."""
    z = z + _GAMMA.astype(z.dtype)
    for shift, factor in zip((30, 27), _FACTORS, strict=True):
        z = (z ^ z >> shift) * factor.astype(z.dtype)
    return z ^ z >> 31
