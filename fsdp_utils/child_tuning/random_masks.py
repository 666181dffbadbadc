"""Random masks that are a function of seed, step and place, at the price of one multiplication per element.

All elements of all parameters are numbered in one row, as if nothing were sharded. The row is cut into
pages. Element i of a page draws the 32-bit number `k1 + k2 * TABLE[i]` (mod 2^32), where TABLE is fixed and
k1 and k2 are hashes of seed, step and page: multiplicative hashing (Dietzfelbinger et al. 1997), under which
each number is uniform and, nearly, any two are independent. An element is kept where its number is among the
largest fraction p. There is no generator whose state could depend on which rank draws or holds what.
"""

import hashlib
import struct
from collections.abc import Iterator

import torch
from torch import Tensor

from fsdp_utils.torch_internals.names import foreach_copy_

PAGE = 2**12  # elements; a part of a parameter draws whole pages
# Elements that are masked at once, unless one parameter has more. On a CPU they stay in its cache; on a GPU
# they keep it busy while the next ones are issued, and 32 MiB of fp32 stay in the L2 cache of an H100.
_MOST = {"cpu": 2**20, "gpu": 2**22}


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
        pages = [
            range(first // PAGE, -(-(first + n) // PAGE)) for first, n in zip(firsts, sizes, strict=True)
        ]
        most = min(_MOST["cpu"], sum(sizes) // 16) if device.type == "cpu" else _MOST["gpu"]
        self.batches: list[list[int]] = [[0]]
        for i in range(1, len(parts)):
            if sum(sizes[j] for j in self.batches[-1]) + sizes[i] > most:
                self.batches.append([])
            self.batches[-1].append(i)
        self._rows = [sum(len(pages[i]) for i in batch) for batch in self.batches]
        self._pages = torch.tensor(
            [page for each in pages for page in each], dtype=torch.int64, device=device
        )
        self._table = _mix(torch.arange(PAGE, device=device)).to(torch.int32)

        def memory(dtype: torch.dtype) -> Tensor:
            return torch.empty(max(self._rows) * PAGE, dtype=dtype, device=device)

        # Gradients of two bytes are masked in fp32: the numbers have four bytes at least.
        wide = torch.float32 if dtype.itemsize == 2 else dtype
        numbers = memory(torch.int32)
        bits = numbers if wide.itemsize == 4 else memory(torch.int64)
        masked = bits.view(wide)
        out = masked if dtype == wide else memory(dtype)
        # One large parameter at a time is read where it lies; bringing several together first is faster.
        self._alone = dtype == wide and len(self.batches) == len(parts)
        gathered = masked if self._alone else memory(wide)
        self._plan = []
        for batch, rows in zip(self.batches, self._rows, strict=True):
            places, at = [], 0
            for i in batch:
                places.append(slice(at + firsts[i] % PAGE, at + firsts[i] % PAGE + sizes[i]))
                at += len(pages[i]) * PAGE
            pieces = [
                [each[place].view(parts[i].shape) for i, place in zip(batch, places, strict=True)]
                for each in (gathered, bits, out)
            ]
            whole = [each[:at] for each in (numbers, bits, gathered.view(bits.dtype), masked, out)]
            self._plan.append((numbers[:at].view(rows, PAGE), whole, pieces))

    def of(self, grads: list[Tensor], *, seed: int, step: int, bound: int) -> Iterator[list[Tensor]]:
        """Yield the masked gradients of each of self.batches: valid until the next, and may be overwritten.

        Args:
            grads: the gradients of the local parts.
            seed, step: what the masks are a function of.
            bound: numbers greater than this one are kept.
        """
        digest = hashlib.blake2b(f"{seed} {step}".encode(), digest_size=8).digest()
        keys = _mix(self._pages ^ int.from_bytes(digest, "little", signed=True)).view(torch.int32).view(-1, 2)
        k1, k2 = keys.split(1, dim=1)
        by_batch = k1.split(self._rows), k2.bitwise_or_(1).split(self._rows)  # odd: no two entries meet
        for batch, plan, own_k1, own_k2 in zip(self.batches, self._plan, *by_batch, strict=True):
            drawn, (numbers, bits, source, masked, out), (before, own_bits, after) = plan
            if drawn.device.type == "cpu":  # where the kernel of addcmul takes one element at a time
                torch.mul(self._table, own_k2, out=drawn).add_(own_k1)
            else:
                torch.addcmul(own_k1, own_k2, self._table, out=drawn)
            if bits.dtype != numbers.dtype:
                bits.copy_(numbers)
            if self._alone:
                source, bits = grads[batch[0]].contiguous().view(bits.dtype), own_bits[0]
            else:
                foreach_copy_(before, [grads[i] for i in batch])
            torch.ops.aten.threshold_backward.grad_input(source, bits, bound, grad_input=bits)
            if out.dtype != masked.dtype:
                out.copy_(masked)
            yield after


def _mix(z: Tensor) -> Tensor:
    """Hash int64 numbers by splitmix64's finalizer (Steele, Lea and Flood 2014)."""
    z = z + 1
    z *= -0x61C8864680B583EB  # the golden ratio, 0x9E3779B97F4A7C15
    for shift, factor in (30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15):
        z ^= (z >> shift) & (2 ** (64 - shift) - 1)  # a shift of int64 repeats the sign
        z *= factor
    return z.bitwise_xor_((z >> 31) & (2**33 - 1))
