"""Random masks that are a function of seed, step and place, at the price of one multiplication per element.

All elements of all parameters are numbered in one row, as if nothing were sharded. The row is cut into
pages. Element i of a page draws the 32-bit number `k1 + k2 * TABLE[i]` (mod 2^32), where TABLE is fixed and
k1 and k2 are hashes of seed, step and page: multiplicative hashing (Dietzfelbinger et al. 1997), under which
each number is uniform and, nearly, any two are independent. An element is kept where its number is among the
largest fraction p. No generator has a state, so nothing depends on who else draws, nor on who holds what.
"""

import struct
from collections.abc import Iterator

import torch
from torch import Tensor

PAGE = 2**16  # elements

_BITS64 = 2**64 - 1
_GAMMA = 0x9E3779B97F4A7C15
_FACTORS = (30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)


def table(device: torch.device) -> Tensor:
    """Return the fixed random numbers of a page, int32."""
    z = torch.arange(1, PAGE + 1, dtype=torch.int64, device=device) * _signed(_GAMMA)
    for shift, factor in _FACTORS:
        z = (z ^ (z >> shift)) * _signed(factor)
    return (z ^ (z >> 31)).to(torch.int32)


def keys(pages: Tensor, seed: int, step: int) -> tuple[Tensor, Tensor]:
    """Compute k1 and k2 (odd) of the pages, a column each, int32.

    Args:
        pages: their numbers, int64. The keys are computed where these lie, so that a GPU need not wait for
            numbers from the CPU.
    """
    z = pages ^ _signed(_mix(_mix(seed & _BITS64) ^ step))
    z += _signed(_GAMMA)
    for shift, factor in _FACTORS:
        z ^= (z >> shift) & (_BITS64 >> shift)  # a shift of int64 repeats the sign
        z *= _signed(factor)
    z ^= (z >> 31) & (_BITS64 >> 31)
    k1, k2 = z.view(torch.int32).view(-1, 2).split(1, dim=1)  # the lower half comes first in memory
    return k1, k2.bitwise_or_(1)


def threshold(p: float) -> tuple[int, float]:
    """A number is kept if it is greater than the first; the second is the fraction that this keeps.

    The fraction is p as fp32 has it, so that fp32 can divide by exactly what is kept.
    """
    if not 0 < p <= 1:
        raise ValueError(f"ChildTuningAdamW: expected reserve_p in (0, 1], found {p}")
    (p,) = struct.unpack("f", struct.pack("f", p))
    kept = min(max(round(p * 2**32), 1), 2**32 - 2**8)
    return 2**31 - 1 - kept, kept / 2**32


def page_runs(first: int, stop: int) -> Iterator[tuple[range, slice]]:
    """Cut the elements [first, stop) where pages begin: the pages of each run, and the part of the table.

    Whole pages that follow each other are one run.
    """
    while first < stop:
        page, entry = divmod(first, PAGE)
        pages = 1 if entry else max(1, (stop - first) // PAGE)
        end = min(PAGE, entry + stop - first)
        yield range(page, page + pages), slice(entry, end)
        first += pages * (end - entry)


def draw(out: Tensor, table: Tensor, k1: Tensor, k2: Tensor) -> None:
    """Draw the numbers of elements of some pages, a row each, to which these entries of the table belong."""
    if out.device.type == "cpu":  # there the kernel of addcmul takes one element at a time
        torch.mul(table, k2, out=out).add_(k1)
    else:
        torch.addcmul(k1, k2, table, out=out)


def keep(bits: Tensor, numbers: Tensor, threshold: int) -> None:
    """numbers := bits where the number is greater than the threshold, else 0. Both integers of one width."""
    torch.ops.aten.threshold_backward.grad_input(bits, numbers, threshold, grad_input=numbers)


def _mix(z: int) -> int:
    """Splitmix64's finalizer (Steele, Lea and Flood 2014)."""
    z = z + _GAMMA & _BITS64
    for shift, factor in _FACTORS:
        z = (z ^ z >> shift) * factor & _BITS64
    return z ^ z >> 31


def _signed(value: int) -> int:
    """The int64 of the same 64 bits."""
    return value - (value >> 63 << 64)
