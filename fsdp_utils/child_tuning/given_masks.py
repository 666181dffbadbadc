"""Find each parameter's mask by name, and the part of it that belongs to this rank."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fsdp_utils.sharding.local_part import Member, Place, local, local_chunk, member_names, places
from fsdp_utils.sharding.names import plain_name

# The masks by the number of a parameter's group and its position there, as Accelerate's prepare replaces the
# parameter; then by name, as FSDP1's flat parameter has several.
Masks = dict[tuple[int, int], dict[str, Tensor]]


def name_in_model(name: str) -> str:
    """Return the name that a parameter has without FSDP and DDP."""
    return plain_name(name).removeprefix("module.")


def names_at(name: str, place: Place) -> list[str]:
    """Return the names of the parameters in this one: several, if it is FSDP1's flat parameter."""
    return [name_in_model(inner) for inner in member_names(name, place) or [name]]


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
    wanted, found = {name_in_model(name): mask for name, mask in given.items()}, Masks()
    known: list[str] = []
    for number, group in enumerate(groups):
        place_of = zip(group["param_names"], group["params"], places(group["params"]), strict=True)
        for i, (name, p, place) in enumerate(place_of):
            inside = names_at(name, place)
            known += inside
            if masks := {inner: wanted[inner] for inner in inside if inner in wanted}:
                found[number, i] = masks
                mask_of(name, masks, p, place)  # raises if it does not fit
    if unknown := sorted(wanted.keys() - set(known)):
        raise ValueError(
            f"ChildTuningAdamW: gradient_mask names {', '.join(unknown[:3])}"
            f"{' and others' if len(unknown) > 3 else ''}, which the optimizer does not have. Expected names "
            f"of its parameters, such as {known[0]}."
        )
    return found


def mask_of(name: str, masks: dict[str, Tensor], p: Tensor, place: Place) -> Tensor:
    """Return the mask of this rank's part of a parameter, in the part's shape.

    Raises:
        ValueError: a mask is neither of the shape of the parameter nor of the part.
    """
    part = local(p)
    if not place.members:
        (mask,) = masks.values()
        return _cut(name, mask, p, place).to(part.device).reshape(part.shape)
    whole = torch.ones(part.shape, dtype=torch.bool, device=part.device)
    for member, inner in zip(place.members, names_at(name, place), strict=True):
        if inner in masks:
            own = whole[member.start : member.start + member.numel]
            own.copy_(_cut(inner, masks[inner], own, member).reshape(own.shape))
    return whole


def _cut(name: str, mask: Tensor, p: Tensor, place: Place | Member) -> Tensor:
    part = local(p)
    if isinstance(mask, DTensor) and isinstance(p, DTensor) and mask.shape == p.shape:
        return local(mask.redistribute(p.device_mesh, p.placements))
    if not isinstance(mask, DTensor):
        if isinstance(p, DTensor) and mask.shape == p.shape:
            return mask[tuple(slice(at, at + n) for at, n in zip(*local_chunk(p), strict=True))]
        if mask.shape == place.shape:
            if place.strides:  # FSDP1 counts elements in the order of their memory
                laid_out = mask.new_empty_strided(place.shape, place.strides).copy_(mask)
                mask = laid_out.as_strided((mask.numel(),), (1,))
            return mask.reshape(-1)[place.offset : place.offset + place.numel]
        if mask.shape in (part.shape, (part.numel(),)):
            return mask
    raise ValueError(
        f"ChildTuningAdamW: gradient_mask[{name!r}]: expected shape {tuple(place.shape)}, or this rank's "
        f"part of it, found {tuple(mask.shape)}"
    )
