"""Find each parameter's mask by name, and the part of it that belongs to this rank."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from fsdp_utils.sharding.local_part import Place, local, member_names, places
from fsdp_utils.sharding.names import plain_name

# By the number of a parameter's group and its position there: Accelerate's prepare replaces the parameter.
Masks = dict[tuple[int, int], Tensor]


def name_in_model(name: str) -> str:
    """The name that a parameter has without FSDP and DDP."""
    return plain_name(name).removeprefix("module.")


def assign(given: Mapping[str, Tensor], groups: list[dict[str, Any]]) -> Masks:
    """Find the parameter of each mask by its name.

    Raises:
        ValueError: parameters have no names; a mask names no parameter, or has another shape.
    """
    if any("param_names" not in group for group in groups):
        raise ValueError(
            'ChildTuningAdamW: mode "task" finds its masks by name. Pass model.named_parameters() '
            "instead of model.parameters()."
        )
    where = [(number, i) for number, group in enumerate(groups) for i in range(len(group["params"]))]
    params = [groups[number]["params"][i] for number, i in where]
    names = [name_in_model(groups[number]["param_names"][i]) for number, i in where]
    wanted, masks = {name_in_model(name): mask for name, mask in given.items()}, Masks()
    known: set[str] = set()
    for at, name, p, place in zip(where, names, params, places(params), strict=True):
        inside = [name_in_model(inner) for inner in member_names(name, place)] or [name]
        found = {inner: wanted[inner] for inner in inside if inner in wanted}
        known.update(inside)
        if found:
            masks[at] = _flat(found, inside, p, place) if place.members else found[name]
            lay_out(name, masks[at], p, place)  # raises if it does not fit
    if unknown := sorted(wanted.keys() - known):
        raise ValueError(
            f"ChildTuningAdamW: gradient_mask names {', '.join(unknown[:3])}"
            f"{' and others' if len(unknown) > 3 else ''}, which the optimizer does not have. Expected names "
            f"of its parameters, such as {names[0]}."
        )
    return masks


def lay_out(name: str, mask: Tensor, p: Tensor, place: Place) -> Tensor:
    """This rank's part of a mask, in the shape of the parameter's; the mask is whole, or this part already.

    A collective where a whole mask becomes a DTensor.

    Raises:
        ValueError: the mask is neither.
    """
    mask = mask.to(local(p).device)
    if isinstance(p, DTensor) and mask.shape == p.shape:
        if isinstance(mask, DTensor):
            return local(mask.redistribute(p.device_mesh, p.placements))
        return local(distribute_tensor(mask, p.device_mesh, p.placements))
    if not isinstance(p, DTensor) and mask.shape == place.shape:
        mask = local(mask)
        if place.strides:  # FSDP1 counts elements in the order of their memory
            mask = mask.new_empty(place.shape).as_strided(place.shape, place.strides).copy_(mask)
            mask = mask.as_strided((mask.numel(),), (1,))
        mask = mask.reshape(-1)[place.offset : place.offset + place.numel]
    part = local(p)
    if not isinstance(mask, DTensor) and mask.shape in (part.shape, (part.numel(),)):
        return mask.reshape(part.shape)
    raise ValueError(
        f"ChildTuningAdamW: gradient_mask[{name!r}]: expected shape {tuple(place.shape)}, or this rank's "
        f"part of it, found {tuple(mask.shape)}"
    )


def _flat(given: Mapping[str, Tensor], names: list[str], p: Tensor, place: Place) -> Tensor:
    """The mask of FSDP1's flat parameter, from those of the parameters inside; ones for those without."""
    mask = torch.ones_like(p, dtype=torch.bool, requires_grad=False)
    for member, name in zip(place.members, names, strict=True):
        if name in given:
            part = mask[member.start : member.start + member.numel]
            inner = Place(member.shape, member.offset, member.numel, strides=member.strides)
            part.copy_(lay_out(name, given[name], part, inner))
    return mask
