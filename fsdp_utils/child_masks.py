"""Random masks that are a function of seed, step and place, at the price of one multiplication per element.

All elements of all parameters are numbered in one row, as if nothing were sharded. The row is cut into
pages. Element i of a page draws the 32-bit number `k1 + k2 * TABLE[i]` (mod 2^32), where TABLE is fixed and
k1 and k2 are hashes of seed, step and page: multiplicative hashing (Dietzfelbinger et al. 1997), under which
each number is uniform and, nearly, any two are independent. An element is kept where its number is among the
largest fraction p. No generator has a state, so nothing depends on who else draws, nor on who holds what.
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
    """A number is kept if it is greater than the first; the second is the fraction that this keeps.

    The fraction is p as fp32 has it, so that fp32 can divide by exactly what is kept.
    """
    kept = min(max(round(float(torch.tensor(p, dtype=torch.float32)) * 2**32), 1), 2**32 - 2**8)
    return 2**31 - 1 - kept, kept / 2**32


def draw(out: Tensor, table: Tensor, k1: Tensor, k2: int) -> None:
    """The numbers of the elements to which these entries of the table belong."""
    torch.add(k1, table, alpha=k2, out=out)


def keep(bits: Tensor, numbers: Tensor, threshold: int) -> None:
    """numbers := bits where the number is greater than the threshold, else 0. Both integers of one width."""
    torch.ops.aten.threshold_backward.grad_input(bits, numbers, threshold, grad_input=numbers)


def _mix(z: int) -> int:
    """Splitmix64's finalizer (Steele, Lea and Flood 2014)."""
    z = z + 0x9E3779B97F4A7C15 & _BITS64
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & _BITS64
    z = (z ^ z >> 27) * 0x94D049BB133111EB & _BITS64
    return z ^ z >> 31


def _signed(value: int, bits: int) -> int:
    return value - (value >> (bits - 1) << bits)
