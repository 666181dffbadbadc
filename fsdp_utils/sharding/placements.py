"""The dimension along which each parameter is cut, so that every rank holds an equal share."""

from collections.abc import Callable, Sequence
from math import prod

from torch import nn
from torch.distributed.tensor import DTensor, Shard

from fsdp_utils.sharding.names import plain_name

UNEVEN = 0.05  # A parameter that needs more padding than this is cut elsewhere
MUCH = 0.5  # Padding above this part of a rank's share undoes what sharding saves ...
FEW_BYTES = 2**20  # ... unless it takes less than this on each rank


def padding(shape: Sequence[int], ranks: int) -> int:
    """How many elements FSDP2 adds, over all ranks, where it cuts between rows."""
    return -shape[0] % ranks * prod(shape[1:])


def dimension(shape: Sequence[int], ranks: int) -> int:
    """Choose the dimension to cut: 0 if that is almost even, else the first that the ranks divide, else 0.

    FSDP2 pads dimension 0 alone. Of the others the first has the longest contiguous pieces to copy.
    """
    if padding(shape, ranks) <= UNEVEN * prod(shape):
        return 0
    return next((dim for dim, size in enumerate(shape) if dim and size % ranks == 0), 0)


def placement_fn(
    parameters: dict[str, nn.Parameter], ranks: int, *, only_rows: str = ""
) -> Callable[[nn.Parameter], Shard | None] | None:
    """Choose fully_shard's `shard_placement_fn`; None where every parameter is cut along dimension 0.

    Args:
        parameters: that are to be sharded, by name.
        ranks: that share the shards.
        only_rows: what keeps FSDP2 from cutting other dimensions than 0, if anything does.

    Raises:
        ValueError: no choice gives the ranks shares that are about equal.
    """
    plain = {name: p for name, p in parameters.items() if p.dim() and not isinstance(p, DTensor)}
    by_rows = {name: p for name, p in plain.items() if only_rows or not dimension(p.shape, ranks)}
    added = {name: padding(p.shape, ranks) * p.itemsize // ranks for name, p in by_rows.items()}
    _refuse_much(plain, added, ranks, only_rows)
    if len(by_rows) == len(plain):
        return None
    # It holds no parameter, so that each unit's full parameters are freed when the unit is sharded.
    return lambda p: None if isinstance(p, DTensor) else Shard(dimension(p.shape, ranks))


def _refuse_much(
    parameters: dict[str, nn.Parameter], added: dict[str, int], ranks: int, only_rows: str
) -> None:
    """Raise where the padding, in bytes on each rank, takes a notable part of what a rank is to hold."""
    total, share = sum(added.values()), sum(p.nbytes for p in parameters.values()) / ranks
    if total <= max(FEW_BYTES, MUCH * share):
        return
    name = max(added, key=added.__getitem__)
    why = only_rows or f"it has no other dimension that {ranks} divides"
    raise ValueError(
        f"shard: {name} of shape {list(parameters[name].shape)} has {parameters[name].shape[0]} rows for "
        f"{ranks} ranks, and {why}: with padding, each rank would hold {1 + total / share:.1f} times its "
        f"share of the model. Expected at most {1 + MUCH} times; shard over fewer ranks (strategy "
        '"hybrid" replicates the shards). Nothing was changed.'
    )


def unevenly_cut(model: nn.Module) -> tuple[list[str], float]:
    """Find parameters that are cut between rows, though another dimension would share them evenly.

    Returns:
        Their names, the largest padding first, and by how much of its share of the model it makes each rank
        hold more; no names where that is at most 5% or a MiB.
    """
    added, share = {}, 0.0
    for name, p in model.named_parameters():
        if isinstance(p, DTensor) and p.dim() and p.placements[-1].is_shard() and p.numel():
            ranks = p.device_mesh.size(p.device_mesh.ndim - 1)
            share += p.numel() * p.itemsize / ranks
            if p.placements[-1].is_shard(0) and dimension(p.shape, ranks):
                added[plain_name(name)] = padding(p.shape, ranks) * p.itemsize / ranks
    total = sum(added.values())
    names = sorted(added, key=added.__getitem__, reverse=True)
    return (names, total / share) if total > max(FEW_BYTES, UNEVEN * share) else ([], 0.0)
