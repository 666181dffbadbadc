"""Find the weights with the largest Fisher information for a task, over the whole sharded model.

No rank ever sees another rank's values: the ranks add up histograms of the values' bits, and so find the
exact threshold.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from fsdp_utils.sharding.local_part import Place, as_dtensor, local, member_names, places
from fsdp_utils.sharding.names import plain_name

__all__ = ["fisher_mask"]

_CHUNK = 2**20  # values that are counted at once


def fisher_mask(
    model: nn.Module,
    batches: Iterable[Any],
    loss_fn: Callable[[nn.Module, Any], Tensor],
    *,
    keep: float = 0.3,
) -> dict[str, Tensor]:
    """Select the weights to fine-tune on a task: those with the largest squared gradients.

    Sums the squares of the gradient over the batches, and keeps the largest fraction of all weights of the
    model that require gradients. Smaller batches are closer to the Fisher information, whose expectation is
    over single samples. Under DDP and FSDP it squares the mean of the ranks' gradients, and does not average
    their squares: for single samples give every rank the same one. The sums are float64, 8 bytes for each
    weight on this rank. The model computes as it stands: call model.eval() first to
    leave dropout out. Under DDP and FSDP every rank must call it, with as many batches; afterwards all
    p.grad are None.

    Args:
        model: plain, or wrapped by DDP, FSDP1 or FSDP2.
        batches: this rank's batches.
        loss_fn: loss_fn(model, batch) -> the loss, of which it takes the gradient.
        keep: the fraction to keep, in (0, 1]. Exact to one weight: where values are equal at the threshold,
            the first ones are kept.

    Returns:
        By parameter name a tensor of bools with the parameter's shape, True where the weight is kept. It is
        sharded as the parameter is: DTensors under FSDP2, this rank's part in one dimension under FSDP1
        (parameter by parameter with flat parameters too).

    Raises:
        ValueError: keep is out of range; no parameter requires gradients; there are no batches; one is None;
            keep or the number of batches differs between ranks; a gradient is not finite. The same on all
            ranks.

    Source: Xu et al. 2021, "Raise a Child in Large Language Model" (arXiv 2109.05687), section 2.2.2.

    Example::

        mask = fisher_mask(model, loader, lambda model, batch: model(batch).mean(), keep=0.3)
        optimizer = ChildTuningAdamW(model.named_parameters(), mode="task", gradient_mask=mask)
    """
    if not 0 < keep <= 1:
        raise ValueError(f"fisher_mask: expected keep in (0, 1], found {keep}")
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not named:
        raise ValueError("fisher_mask: no parameter of the model requires gradients.")
    ranks = _Ranks(model, list(named.values()))
    asked = ranks.gather(torch.tensor([keep], dtype=torch.float64).view(torch.int64))  # as bits, exactly
    if any(other != asked[0] for other in asked):
        found = ", ".join(f"{other.view(torch.float64).item():g}" for other in asked[:8])
        raise ValueError(f"fisher_mask: expected the same keep on all ranks, found {found}")
    where = places(list(named.values()))
    fisher = [
        torch.zeros(place.numel - place.padding, dtype=torch.float64, device=_with_float64(local(p).device))
        for p, place in zip(named.values(), where, strict=True)
    ]
    for batch in _in_step(batches, ranks):
        model.zero_grad(set_to_none=True)
        loss_fn(model, batch).backward()
        for total, p in zip(fisher, named.values(), strict=True):
            if p.grad is not None:
                grad = local(p.grad.to_dense() if p.grad.is_sparse else p.grad)
                grad = grad.detach().reshape(-1)[: total.numel()].to(total.device).to(total.dtype)
                total.addcmul_(grad, grad)  # in fp32 the square of 1e20 is infinite, and that of 1e-23 is 0
    model.zero_grad(set_to_none=True)

    bad = [bool(total.isfinite().all().logical_not()) for total in fisher]
    bad = ranks.sum(torch.tensor(bad, dtype=torch.int64)).tolist()
    if any(bad):
        names = [plain_name(name) for name, found in zip(named, bad, strict=True) if found]
        raise ValueError(
            f"fisher_mask: expected finite gradients, found others in {', '.join(names[:3])}"
            f"{' and others' if len(names) > 3 else ''}. Lower the loss's scale, or compute in fp32 or bf16."
        )
    masks = _largest(fisher, where, keep, ranks)
    strip = "module." if isinstance(model, DistributedDataParallel) else ""
    result = {}
    for (name, p), place, mask in zip(named.items(), where, masks, strict=True):
        name = plain_name(name.removeprefix(strip))
        if place.members:
            for member, inner in zip(place.members, member_names(name, place), strict=True):
                result[inner] = mask[member.start : member.start + member.numel]
        elif isinstance(p, DTensor):
            result[name] = as_dtensor(mask.view(local(p).shape), p)
        else:
            result[name] = mask.view(p.shape)
    return result


def _with_float64(device: torch.device) -> torch.device:
    return torch.device("cpu") if device.type == "mps" else device


def _in_step(batches: Iterable[Any], ranks: "_Ranks") -> Iterator[Any]:
    """The batches, as long as all ranks have one; a rank without would leave the others waiting."""
    given, end, iterator = 0, object(), iter(() if batches is None else batches)
    while True:
        batch = next(iterator, end)
        found = torch.tensor([batch is not end, batch is None], dtype=torch.int64)
        with_one, empty = ranks.sum(found).tolist()
        if empty:
            raise ValueError(
                f"fisher_mask: expected batches, found None as number {given}, counted from 0. Does the "
                "collate function of the DataLoader return its batch?"
            )
        if with_one == 0:
            break
        if with_one < ranks.world_size:
            raise ValueError(
                f"fisher_mask: expected as many batches on every rank, found {with_one} of "
                f"{ranks.world_size} ranks with more than {given}. Cut them to the same number."
            )
        given += 1
        yield batch
    if given == 0:
        raise ValueError("fisher_mask: expected batches to compute gradients on, found none.")


def _largest(fisher: list[Tensor], where: list[Place], keep: float, ranks: "_Ranks") -> list[Tensor]:
    """Masks of the largest fraction `keep` of all values on all ranks; each replicated value counts once."""
    mine = [[place.offset, f.numel()] for place, f in zip(where, fisher, strict=True)]
    spans = ranks.gather(torch.tensor(mine))
    owned = [
        f
        for i, f in enumerate(fisher)
        if f.numel() and not any(span[i, 1] > 0 and span[i, 0] == mine[i][0] for span in spans[: ranks.rank])
    ]
    total = int(ranks.sum(torch.tensor([sum(f.numel() for f in owned)])))
    wanted = max(1, round(keep * total))

    # The bits of floats that are not negative are in the order of the floats. The threshold's are found 16 at
    # a time, from above.
    bound, wanted_ties = 0, wanted
    for shift in (48, 32, 16, 0):
        digit, wanted_ties = _bin_of(wanted_ties, ranks.sum(_histogram(owned, bound, shift)))
        bound |= digit << shift

    ties = [int((f.view(torch.int64) == bound).sum()) for f in fisher]
    all_ties = ranks.gather(torch.tensor(ties))
    masks = []
    earlier = 0  # ties in the parameters before
    for i, f in enumerate(fisher):
        pairs = zip(spans, all_ties, strict=True)
        of_part = {int(span[i, 0]): int(count[i]) for span, count in pairs if span[i, 1]}
        before = sum(count for offset, count in of_part.items() if offset < where[i].offset)
        mask = f.view(torch.int64) > bound
        quota = min(max(wanted_ties - earlier - before, 0), ties[i])
        mask[(f.view(torch.int64) == bound).nonzero()[:quota, 0]] = True
        masks.append(mask)
        earlier += sum(of_part.values())
    return masks


def _histogram(tensors: list[Tensor], bound: int, shift: int) -> Tensor:
    """Count the values by their 16 bits from `shift` on, of those with the same bits above as `bound`."""
    counts = torch.zeros(2**16, dtype=torch.int64)
    for chunk in (chunk for values in tensors for chunk in values.view(torch.int64).split(_CHUNK)):
        upper = chunk >> shift
        counts += torch.bincount(upper[upper >> 16 == bound >> shift >> 16] & 0xFFFF, minlength=2**16).cpu()
    return counts


def _bin_of(wanted: int, counts: Tensor) -> tuple[int, int]:
    """The bin that holds the wanted-th largest value, and that value's place in the bin, from above."""
    from_above = counts.flip(0).cumsum(0)
    bin_from_above = int((from_above >= wanted).nonzero()[0])
    above = int(from_above[bin_from_above - 1]) if bin_from_above else 0
    return counts.numel() - 1 - bin_from_above, wanted - above


class _Ranks:
    """The ranks that share the model; this one alone, where the model is not distributed."""

    def __init__(self, model: nn.Module, params: list[nn.Parameter]) -> None:
        wrapped = any(
            isinstance(m, DistributedDataParallel | FullyShardedDataParallel) for m in model.modules()
        )
        meshes = [p.device_mesh for p in params if isinstance(p, DTensor)]
        self.together = wrapped or bool(meshes)
        self.device = torch.device(meshes[0].device_type) if meshes else params[0].device
        self.rank = dist.get_rank() if self.together else 0
        self.world_size = dist.get_world_size() if self.together else 1

    def sum(self, values: Tensor) -> Tensor:
        if self.together:
            values = values.to(self.device)
            dist.all_reduce(values)
        return values.cpu()

    def gather(self, values: Tensor) -> list[Tensor]:
        if not self.together:
            return [values]
        values = values.to(self.device)
        found = [torch.empty_like(values) for _ in range(self.world_size)]
        dist.all_gather(found, values)
        return [each.cpu() for each in found]
