"""Find the weights with the largest Fisher information for a task: ranks count those above a bound."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel as DDP

from fsdp_utils.distributed.agreement import Ranks, agree
from fsdp_utils.sharding.local_part import Piece, local, pieces
from fsdp_utils.sharding.names import some_names

_WAIT_S = 1800.0  # for a rank whose batches take longer
_Parts = list[tuple[nn.Parameter, Piece]]


def fisher_mask(
    model: nn.Module,
    batches: Iterable[Any],
    loss_fn: Callable[[nn.Module, Any], Tensor],
    *,
    keep: float = 0.3,
) -> dict[str, Tensor]:
    """Select the weights to fine-tune on a task: those with the largest squared gradients.

    Sums the squares of the gradient over the batches, in float64; the fewer samples in a batch, the closer to
    the Fisher information. Under DDP and FSDP the gradient is the mean over the ranks (for single samples
    give every rank the same one), and every rank must call this. Afterwards all p.grad are None.

    Args:
        model: plain, or wrapped by DDP, FSDP1 or FSDP2.
        batches: this rank's batches, as many on every rank.
        loss_fn: loss_fn(model, batch) -> the loss, of which it takes the gradient.
        keep: the fraction to keep of all weights that require gradients, in (0, 1]. Exact to one weight: of
            equal values the first ones are kept.

    Returns:
        By parameter name, without those of wrappers, bools of the parameter's shape, True where it is kept,
        sharded as the parameter is: DTensors under FSDP2, this rank's part in one dimension under FSDP1.

    Raises:
        ValueError: nothing to keep or to train; no batches, or not as many on all ranks; another keep on
            another rank; a gradient that is not finite. The same on all ranks. After half an hour: ranks that
            did not call this.

    Source: Xu et al. 2021, "Raise a Child in Large Language Model" (arXiv 2109.05687), section 2.2.2.

    Example::

        mask = fisher_mask(model, loader, lambda model, batch: model(batch).mean(), keep=0.3)
        optimizer = ChildTuningAdamW(model.named_parameters(), mode="task", gradient_mask=mask)
    """
    if not 0 < keep <= 1:
        raise ValueError(f"fisher_mask: expected keep in (0, 1], found {keep}")
    inner: nn.Module = model.module if isinstance(model, DDP) else model
    params = [(name, p) for name, p in inner.named_parameters() if p.requires_grad]
    if not params:
        raise ValueError("fisher_mask: no parameter of the model requires gradients.")
    ranks = Ranks("fisher_mask", ValueError, alone=True)
    is_wrapped = any(isinstance(module, DDP | FSDP1) for module in model.modules())
    if is_wrapped or any(isinstance(p, DTensor) for _, p in params):
        limits = {"wait_s": _WAIT_S, "collective_s": _WAIT_S}
        ranks = agree("fisher_mask", lambda: {"keep": keep}, error=ValueError, topic="fisher", **limits)
    parts = [(p, piece) for (_, p), own in zip(params, pieces(params), strict=True) for piece in own]
    fisher = _squared_gradients(model, batches, loss_fn, parts, ranks)
    bad = ranks.all(lambda: [not total.isfinite().all() for total in fisher])
    if names := [piece.name for (_, piece), *found in zip(parts, *bad, strict=True) if any(found)]:
        raise ValueError(
            f"fisher_mask: expected finite gradients, found others in {some_names(names)}. Lower the loss's "
            "scale, or compute in fp32 or bf16."
        )
    masks = _largest(fisher, [piece for _, piece in parts], keep, ranks)
    return {piece.name: _like(p, mask) for (p, piece), mask in zip(parts, masks, strict=True)}


def _like(p: nn.Parameter, mask: Tensor) -> Tensor:
    part = local(p)
    if mask.numel() == part.numel():  # else it is one of several in FSDP1's flat parameter
        mask = mask.view(part.shape)
    if not isinstance(p, DTensor):
        return mask
    like = {"shape": p.shape, "stride": p.stride()}
    return DTensor.from_local(mask, p.device_mesh, p.placements, run_check=False, **like)


def _squared_gradients(
    model: nn.Module, batches: Any, loss_fn: Any, parts: _Parts, ranks: Ranks
) -> list[Tensor]:
    """Sum the squares over the batches, for this rank's elements."""
    # In fp32 the square of 1e20 is infinite and that of 1e-23 is 0. Apple's GPU has no fp64.
    devices = ["cpu" if p.device.type == "mps" else p.device for p, _ in parts]
    sizes = [piece.numel for _, piece in parts]
    fisher = [torch.zeros(n, dtype=torch.float64, device=d) for n, d in zip(sizes, devices, strict=True)]
    given, end, iterator = 0, object(), iter(() if batches is None else batches)
    while with_one := sum(ranks.numbers((batch := next(iterator, end)) is not end)):
        if with_one < ranks.world_size:  # which would leave the others waiting
            raise ValueError(
                f"fisher_mask: expected as many batches on every rank, found {with_one} of "
                f"{ranks.world_size} ranks with more than {given}. Cut them to the same number."
            )
        given += 1
        model.zero_grad(set_to_none=True)
        loss_fn(model, batch).backward()
        for total, (p, piece) in zip(fisher, parts, strict=True):
            if p.grad is not None:
                dense = p.grad.to_dense() if p.grad.is_sparse else p.grad
                grad = local(dense).detach().reshape(-1)[piece.start : piece.start + piece.numel].to(total)
                total.addcmul_(grad, grad)
    if given == 0:
        raise ValueError("fisher_mask: expected batches to compute gradients on, found none.")
    model.zero_grad(set_to_none=True)
    return fisher


def _largest(fisher: list[Tensor], where: list[Piece], keep: float, ranks: Ranks) -> list[Tensor]:
    """Mask the largest fraction `keep` of all values on all ranks; each replicated value counts once."""
    mine = torch.tensor([[piece.offset, piece.numel] for piece in where])
    held = mine[:, 1] == 0
    for of_rank in ranks.all(lambda: mine)[: ranks.rank]:
        held |= (of_rank[:, 0] == mine[:, 0]) & (of_rank[:, 1] > 0)  # by an earlier rank too
    owned = (~held).nonzero()[:, 0].tolist()
    total = sum(ranks.numbers(sum(where[i].numel for i in owned)))
    # The bits of floats that are not negative are in the order of the floats.
    bits = [f.view(torch.int64) for f in fisher]
    bound, ties = _bound([bits[i] for i in owned], max(1, round(keep * total)), ranks)
    # Of those that are equal to the bound, keep the first in the model.
    places_of_ties, following = [], 0
    for b, piece in zip(bits, where, strict=True):
        places_of_ties.append(2**62 - following - piece.offset - (b == bound).nonzero()[:, 0])
        following += piece.shape.numel()
    last, _ = _bound([places_of_ties[i] for i in owned], ties, ranks)
    masks = [b > bound for b in bits]
    for mask, b, at in zip(masks, bits, places_of_ties, strict=True):
        mask[b == bound] = at >= last
    return masks


def _bound(tensors: list[Tensor], wanted: int, ranks: Ranks) -> tuple[int, int]:
    """Find the wanted-th largest of all ranks' values, and how many that equal it are among the wanted."""

    def reach(least: int) -> int:
        return sum(ranks.numbers(sum(int((values >= least).sum()) for values in tensors)))

    bound = 0
    for bit in reversed(range(63)):
        if reach(bound | 1 << bit) >= wanted:
            bound |= 1 << bit
    return bound, wanted - reach(bound + 1)
