"""Random masks that are a function of seed, step and place, at the price of one multiplication per element.

All elements of all parameters are numbered in one row, as if nothing were sharded. The row is cut into
pages. Element i of a page draws the 32-bit number `k1 + k2 * TABLE[i]` (mod 2^32), where TABLE is fixed and
k1 and k2 are hashes of seed, step and page: multiplicative hashing (Dietzfelbinger et al. 1997), under which
each number is uniform and, nearly, any two are independent. An element is kept where its number is among the
largest fraction p. No generator has a state, so nothing depends on who else draws, nor on who holds what.

A mask that is given is packed, a bit per element. One shift per element makes such numbers of it.
"""

import torch
from torch import Tensor

PAGE = 2**16  # elements

_BITS64 = 2**64 - 1


def table(size: int, device: torch.device) -> Tensor:
    """The first `size` (<= PAGE) of the fixed random numbers, int32."""
    z = torch.arange(1, size + 1, dtype=torch.int64, device=device) * _signed(0x9E3779B97F4A7C15, 64)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        z = (z ^ (z >> shift)) * _signed(factor, 64)
    return (z ^ (z >> 31)).to(torch.int32)


def keys(seed: int, step: int, page: int) -> tuple[int, int]:
    """k1 and k2 (odd) of a page, as int32 takes them."""
    mixed = _mix(_mix(_mix(seed & _BITS64) ^ step) ^ page)
    return _signed(mixed & 0xFFFFFFFF, 32), _signed(mixed >> 32 | 1, 32)


def threshold(p: float) -> tuple[int, float]:
    """A number is kept if it is greater than the first; the second is the fraction that this keeps."""
    kept = min(max(round(p * 2**32), 1), 2**32 - 1)
    return 2**31 - 1 - kept, kept / 2**32


def draw(out: Tensor, table: Tensor, k1: Tensor, k2: int) -> None:
    """The numbers of the elements to which these entries of the table belong."""
    torch.add(k1, table, alpha=k2, out=out)


def keep(bits: Tensor, numbers: Tensor, threshold: int) -> None:
    """numbers := bits where the number is greater than the threshold, else 0. Both integers of one width."""
    torch.ops.aten.threshold_backward.grad_input(bits, numbers, threshold, grad_input=numbers)


class Packed:
    """A mask that is given: each integer holds the bits of elements that lie a row apart.

    Args:
        kept: what the mask keeps: bools, one after the other.
        integer: the type of the numbers that are wanted, as wide as the gradient's elements.
    """

    def __init__(self, kept: Tensor, integer: torch.dtype) -> None:
        rows = 8 * integer.itemsize
        self._powers = 1 << torch.arange(rows, dtype=integer, device=kept.device)[:, None]
        padded = torch.zeros(rows, -(-kept.numel() // rows), dtype=torch.bool, device=kept.device)
        padded.view(-1)[: kept.numel()] = kept
        self._words = torch.zeros(1, padded.shape[1], dtype=integer, device=kept.device)
        for row, kept_there in enumerate(padded):
            self._words |= (~kept_there).to(integer) << (rows - 1 - row)  # shifted by row, it is the sign

    def unpack(self, out: Tensor) -> None:
        """For each element a number greater than -1, if the mask keeps it, or else not."""
        rows, columns = len(self._powers), self._words.numel()
        shifted = out[: rows * columns].view(rows, columns)
        torch.mul(self._words, self._powers, out=shifted)


def _mix(z: int) -> int:
    """Splitmix64's finalizer (Steele, Lea and Flood 2014)."""
    z = z + 0x9E3779B97F4A7C15 & _BITS64
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & _BITS64
    z = (z ^ z >> 27) * 0x94D049BB133111EB & _BITS64
    return z ^ z >> 31


def _signed(value: int, bits: int) -> int:
    return value - (value >> (bits - 1) << bits)
