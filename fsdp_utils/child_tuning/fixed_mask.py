"""Fixed masks, stored in AdamW's second moments: the moment of a masked weight is infinite.

AdamW divides what it takes from a weight by the root of its second moment, and what is divided by infinity is
0. An infinite average of squares stays infinite. So AdamW's own kernel leaves these weights where they are,
and a step with a mask costs what a step costs, in time and in memory.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from fsdp_utils.child_tuning.fused_kernel import row
from fsdp_utils.sharding.local_part import Place, as_dtensor, local, member_names, places
from fsdp_utils.sharding.names import plain_name

# By the number of a parameter's group and its position there: its mask, laid out as the parameter; None once
# the mask has moved into the second moment. Not by the parameter: Accelerate's prepare replaces that.
Masks = dict[tuple[int, int], Tensor | None]

_AT_ONCE = 2**20  # elements whose decay needs memory of its own at one time


def held(exp_avg_sq: Tensor) -> Tensor:
    """Which weights are masked: also those whose moment has overflowed, as AdamW never moves them again."""
    return exp_avg_sq.isinf()


def hold(exp_avg_sq: Tensor, mask: Tensor) -> Tensor:
    """This second moment, with what the mask does not keep held."""
    return exp_avg_sq.masked_fill(mask.to(exp_avg_sq.device) == 0, torch.inf)


def decay_kept(params: list[Tensor], exp_avg_sqs: list[Tensor], rate: float) -> None:
    """Weight decay, `rate` of each weight, for those that are not held."""
    for weights, squares in _pieces(params, exp_avg_sqs):
        weights.copy_(torch.where(held(squares), weights, weights * (1 - rate)))


def _pieces(params: list[Tensor], exp_avg_sqs: list[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    for p, exp_avg_sq in zip(params, exp_avg_sqs, strict=True):
        yield from zip(row(p).split(_AT_ONCE), row(exp_avg_sq).split(_AT_ONCE), strict=True)


# ---- whose mask is it? ---------------------------------------------------------------------------------


def assigned(given: Mapping[str, Tensor], groups: list[dict[str, Any]]) -> Masks:
    """Find the parameter of each mask by its name, and lay the mask out as the parameter.

    Raises:
        ValueError: parameters have no names, or two of them have the name of a mask; a mask names no
            parameter, or has another shape.
    """
    named: dict[str, tuple[tuple[int, int], Tensor]] = {}
    for number, group in enumerate(groups):
        if "param_names" not in group:
            raise ValueError(
                'ChildTuningAdamW: mode "task" finds its masks by name. Pass model.named_parameters() '
                "instead of model.parameters()."
            )
        for position, (name, p) in enumerate(zip(group["param_names"], group["params"], strict=True)):
            if name in named and name in given:
                raise ValueError(
                    f"ChildTuningAdamW: gradient_mask names {name}, and two parameters of the optimizer "
                    "are called so. Use one optimizer for each model."
                )
            named[name] = (number, position), p
    wanted, masks = dict(given), Masks()
    params = [p for _, p in named.values()]
    for (name, (where, p)), place in zip(named.items(), places(params), strict=True):
        if place.members:
            masks[where] = mask = torch.ones_like(p, dtype=torch.bool, requires_grad=False)
            for member, inner in zip(place.members, member_names(name, place), strict=True):
                if inner in wanted:
                    inner_place = Place(member.shape, member.offset, member.numel, strides=member.strides)
                    part = _part(inner, wanted.pop(inner), inner_place, (member.numel,))
                    mask[member.start : member.start + member.numel] = part
            continue
        aliases = (name, plain_name(name), plain_name(name).removeprefix("module."))
        alias = next((alias for alias in aliases if alias in wanted), None)
        if alias is not None:
            masks[where] = _laid_out(alias, wanted.pop(alias), p, place)
    if wanted:
        raise ValueError(
            f"ChildTuningAdamW: gradient_mask names {', '.join(sorted(wanted)[:3])}"
            f"{' and others' if len(wanted) > 3 else ''}, which the optimizer does not have. Expected names "
            f"of its parameters, such as {plain_name(next(iter(named)))}."
        )
    return masks


def follow(masks: Masks, groups: list[dict[str, Any]], state: Mapping[Tensor, Any]) -> None:
    """Lay out anew the masks of parameters that were replaced in their groups since the masks were given.

    Accelerate does so: its prepare shards the model, and puts the shards in the places of the parameters.

    Raises:
        ValueError: a mask's parameter is gone, or has another shape.
        RuntimeError: the parameter was replaced after its mask had moved into its moments.
    """
    replaced: list[tuple[tuple[int, int], Tensor, Tensor]] = []
    for where, mask in masks.items():
        params = groups[where[0]]["params"]
        if where[1] >= len(params):
            raise ValueError(
                f"ChildTuningAdamW: the mask of {_name(groups, where)} matches no parameter: it was given "
                f"for parameter {where[1]} of group {where[0]}, and the group has only {len(params)} now. "
                "Create the optimizer again with the parameters that it is to train."
            )
        p = params[where[1]]
        if mask is None and not state.get(p):
            raise RuntimeError(
                f"ChildTuningAdamW: {_name(groups, where)} was replaced by another tensor, or its state was "
                "removed, after steps had been taken; its mask and moments are lost. Shard or move the model "
                "before the first step, or call load_state_dict() with the state saved before."
            )
        if mask is not None and not _alike(mask, p):
            replaced.append((where, p, mask))
    if replaced:
        where_they_lie = places([p for _, p, _ in replaced])
        for (where, p, mask), place in zip(replaced, where_they_lie, strict=True):
            masks[where] = _laid_out(_name(groups, where), mask, p, place)


def _name(groups: list[dict[str, Any]], where: tuple[int, int]) -> str:
    names = groups[where[0]].get("param_names", [])
    return names[where[1]] if where[1] < len(names) else f"parameter {where[1]} of group {where[0]}"


def _alike(mask: Tensor, p: Tensor) -> bool:
    if isinstance(mask, DTensor) and isinstance(p, DTensor):
        return (mask.shape, mask.device_mesh, mask.placements) == (p.shape, p.device_mesh, p.placements)
    return not isinstance(mask, DTensor) and not isinstance(p, DTensor) and mask.shape == p.shape


def _laid_out(name: str, mask: Tensor, p: Tensor, place: Place) -> Tensor:
    """A mask, given whole or as this rank's part, as the parameter is laid out."""
    if isinstance(p, DTensor):
        return _dtensor_mask(name, mask, p)
    if local(mask).shape != p.shape:
        mask = _part(name, mask, place, p.shape).view(p.shape)
    return torch.empty_like(p, dtype=torch.bool, requires_grad=False).copy_(local(mask))


def _part(name: str, mask: Tensor, place: Place, shape: Iterable[int]) -> Tensor:
    """This rank's part of a mask that is given whole, or is already this part."""
    mask = local(mask)
    if mask.shape == place.shape:
        if place.strides:
            mask = row(torch.empty_strided(place.shape, place.strides, dtype=mask.dtype).copy_(mask))
        return mask.reshape(-1)[place.offset : place.offset + place.numel]
    if tuple(mask.shape) in (tuple(shape), (place.numel,)):
        return mask.reshape(-1)
    raise ValueError(
        f"ChildTuningAdamW: gradient_mask[{name!r}]: expected shape {tuple(place.shape)} (or this rank's "
        f"part of it, {tuple(shape)}), found {tuple(mask.shape)}"
    )


def _dtensor_mask(name: str, mask: Tensor, p: DTensor) -> DTensor:
    if mask.shape != p.shape:
        raise ValueError(
            f"ChildTuningAdamW: gradient_mask[{name!r}]: expected shape {tuple(p.shape)}, found "
            f"{tuple(mask.shape)}"
        )
    if isinstance(mask, DTensor):
        mask = mask.redistribute(p.device_mesh, p.placements)
        return as_dtensor(local(mask).to(torch.bool), p)
    return distribute_tensor(mask.to(local(p).device, torch.bool), p.device_mesh, p.placements)
