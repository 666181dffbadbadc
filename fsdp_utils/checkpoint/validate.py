"""Checks before anything is changed: can the model be saved, does the checkpoint hold what it needs?"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1
from torch.distributed.fsdp import ShardingStrategy
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from fsdp_utils.checkpoint.errors import CheckpointDamagedError, CheckpointError, CheckpointMismatchError
from fsdp_utils.checkpoint.reader import read_plain
from fsdp_utils.checkpoint.state import (
    MODEL,
    PLAIN,
    OptimizerPlan,
    Snapshot,
    optimizer_classes,
    parameter_names,
)
from fsdp_utils.checkpoint.user_state import insert_sharded
from fsdp_utils.sharding.names import plain_name
from fsdp_utils.torch_internals.fsdp import Flat, fsdp1_handle


def check_supported(model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
    """Check that a model, and optimizers over its parameters, can be saved and loaded.

    Raises:
        CheckpointError: it is not; says what to do.
    """
    units = [module for module in model.modules() if isinstance(module, FSDP1)]
    for unit in units:
        for name, module in unit.named_modules():
            if isinstance(module, DistributedDataParallel):
                raise CheckpointError(
                    f"expected no DistributedDataParallel inside of FSDP1, found {plain_name(name)!r}, of "
                    "which FSDP1's state dict loses the parameters. Wrap the module in FSDP1 with "
                    "ShardingStrategy.NO_SHARD instead"
                )
        handle = fsdp1_handle(unit)
        if handle is not None and unit.sharding_strategy != ShardingStrategy.NO_SHARD:
            _check_even(Flat(handle.flat_param))
    if not optimizers:
        return
    for optimizer in optimizers:
        if not isinstance(optimizer, Optimizer):
            raise CheckpointError(
                "expected a torch.optim.Optimizer, a sequence or mapping of several, or None, found "
                f"{type(optimizer).__name__}"
            )
    flat = [handle.flat_param for unit in units if (handle := fsdp1_handle(unit)) is not None]
    if any(extension is not None for param in flat for extension in Flat(param).extensions):
        raise CheckpointError(
            "expected FSDP1 around parameters that nothing else shards, found tensor-parallel ones: FSDP1 "
            "gives the optimizer's state of only one part of each. Use FSDP2 (fully_shard), or save without "
            "the optimizer"
        )
    names = parameter_names(model)
    params = [param for one in optimizers for group in one.param_groups for param in group["params"]]
    strangers = [param for param in params if param not in names]
    if strangers:
        raise CheckpointError(
            f"expected an optimizer over the model's parameters, found {len(strangers)} of others, such as "
            f"one of shape {list(strangers[0].shape)}. Make the optimizer after the model is wrapped"
        )
    twice = next((param for param, count in Counter(params).items() if count > 1), None)
    if twice is not None:
        raise CheckpointError(
            f"expected each parameter in one optimizer, found {names[twice][0]!r} in two: their states would "
            "have the same name. Save one of them as state, such as state={'second': second}"
        )


def _check_even(flat: Flat) -> None:
    """Refuse FSDP1 over uneven tensor-parallel parts, which torch gathers as if all had one size."""
    for name, spec in zip(flat.names, flat.extensions, strict=True):
        if spec is None:
            continue
        for size, placement in zip(spec.mesh.shape, spec.placements, strict=True):
            if placement.is_shard() and spec.shape[placement.dim] % size:
                raise CheckpointError(
                    f"expected tensor-parallel parameters inside of FSDP1 to be cut into equal parts, found "
                    f"{plain_name(name)!r} {list(spec.shape)} cut into {size} along dimension "
                    f"{placement.dim}: FSDP1's state dict sends parts of wrong sizes. Use FSDP2 (fully_shard)"
                )


class NotLoaded(NamedTuple):
    """What a load leaves as it is, by name."""

    missing_keys: list[str]  # in the model
    unexpected_keys: list[str]  # in the checkpoint


def check_model(
    wanted: Snapshot,
    found: Mapping[str, tuple[torch.dtype, torch.Size]],
    tied: Mapping[str, str],
    *,
    cast: bool,
    strict: bool,
    ignored: Collection[str],
) -> "NotLoaded":
    """Check that the checkpoint holds exactly this model.

    Args:
        wanted: of the model that is to be loaded.
        found: dtype and shape of what the checkpoint holds under "model.", tied names included.
        tied: which names were tied when it was saved.
        cast: another dtype is no mistake.
        strict: False if what only one of the two has is no mistake.
        ignored: names in the model that are not to be loaded.

    Returns:
        What will not be loaded.

    Raises:
        CheckpointError: with the first few differences.
    """
    problems = []
    left = NotLoaded([], [])
    ignored = set(ignored)
    for key, tensor in wanted.tensors.items():
        name = key.removeprefix(MODEL)
        if not key.startswith(MODEL):
            continue
        if name in ignored or key not in found:
            left.missing_keys.append(name)
            if strict and name not in ignored:
                problems.append(f"{key}: expected by the model, found nothing in the checkpoint")
            continue
        dtype, shape = found[key]
        if tensor.is_meta:
            problems.append(
                f"{key}: the model's parameter is on the meta device; call model.to_empty() first"
            )
        if shape != tensor.shape:
            problems.append(
                f"{key}: expected shape {list(tensor.shape)} (the model's), found {list(shape)} in the "
                "checkpoint"
            )
        if dtype != tensor.dtype and not cast:
            problems.append(
                f"{key}: expected {tensor.dtype} (the model's), found {dtype} in the checkpoint; "
                "cast=True converts it"
            )
    for key in found:
        name = key.removeprefix(MODEL)
        if name in ignored or (not strict and name in wanted.tied and MODEL + wanted.tied[name] not in found):
            left.unexpected_keys.append(name)
        elif name in wanted.tied:
            if tied.get(name, name) != tied.get(wanted.tied[name], wanted.tied[name]):
                problems.append(
                    f"{key}: expected one tensor under this name and {wanted.tied[name]!r} (tied in the "
                    "model), found two in the checkpoint"
                )
        elif key not in wanted.tensors:
            left.unexpected_keys.append(name)
            if strict:
                problems.append(f"{key}: in the checkpoint, expected by nothing in the model")
    if not problems and found and len(left.missing_keys) == len(wanted.tensors) > 0:
        problems.append(
            f"expected at least one tensor to load, found none: the model has {left.missing_keys[:3]}, the "
            f"checkpoint {[key.removeprefix(MODEL) for key in found][:3]}"
        )
    if problems:
        shown = problems[:5] + ([f"... and {len(problems) - 5} more"] if len(problems) > 5 else [])
        if strict and (left.missing_keys or left.unexpected_keys):
            shown.append("strict=False loads what both have, and returns the names of the rest")
        raise CheckpointMismatchError("the checkpoint is of another model:\n  " + "\n  ".join(shown))
    return left


def match_optimizers(
    wanted: Snapshot,
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    saved: OptimizerPlan | None,
    classes: Any,
) -> list[OptimizerPlan]:
    """Find the saved state of each optimizer, by its parameters, and check it.

    Args:
        classes: as check_optimizer() has it, or a list of that for each of several saved optimizers.

    Raises:
        CheckpointError: there is none, or it is of others.
    """
    if saved is None:
        raise CheckpointMismatchError(
            "expected the state of an optimizer, found none: the checkpoint was saved without one. "
            "Load without the optimizer if it is to start anew."
        )
    plans = saved.split()
    of_plan = classes if saved.group_counts else [classes]
    if len(of_plan) != len(plans):  # a forged record
        of_plan = [[] for _ in plans]
    if len(plans) != len(optimizers):
        own = ", ".join(optimizer_classes(one)[0] for one in optimizers[:5])
        raise CheckpointMismatchError(
            f"expected the state of {len(optimizers)} optimizers ({own}{', ...' * (len(optimizers) > 5)}), "
            f"found that of {len(plans)} in the checkpoint. Give as many as were saved, in any order, or "
            "none if they are to start anew."
        )
    names = parameter_names(model)
    unused = list(range(len(plans)))
    by_names: dict[frozenset[str], list[int]] = {}
    for number, plan in enumerate(plans):
        params = frozenset(wanted.first_name(name) for group in plan.groups for name in group["params"])
        by_names.setdefault(params, []).append(number)
    chosen: list[int | None] = []
    for one in optimizers:
        own = frozenset(n for group in one.param_groups for param in group["params"] for n in names[param])
        numbers = by_names.get(own)
        chosen.append(numbers.pop(0) if numbers else None)
        if chosen[-1] is not None:
            unused.remove(chosen[-1])
    found = []
    for one, number in zip(optimizers, chosen, strict=True):
        number = unused.pop(0) if number is None else number  # of other parameters, which the error names
        check_optimizer(wanted, names, one, plans[number], of_plan[number])
        found.append(plans[number])
    return found


def check_optimizer(
    wanted: Snapshot,
    names: Mapping[nn.Parameter, list[str]],
    optimizer: Optimizer,
    saved: OptimizerPlan,
    classes: Sequence[str],
) -> None:
    """Check that the saved optimizer is of a related class, over the same parameters in the same groups.

    Args:
        names: from parameter_names().
        classes: names of the saved optimizer's class and of those it is derived from; empty when unknown.

    Raises:
        CheckpointError: it is of others.
    """
    own = optimizer_classes(optimizer)
    if classes and not set(classes) & set(own):
        raise CheckpointMismatchError(
            f"expected the state of {own[0]}, found that of {classes[0]}, which {own[0]} cannot go on from. "
            f"Load into {classes[0]}, or without the optimizer if it is to start anew."
        )
    expected = [
        {name for param in group["params"] for name in names[param]} for group in optimizer.param_groups
    ]
    found = [{wanted.first_name(name) for name in group["params"]} for group in saved.groups]
    if sorted(map(sorted, expected)) != sorted(map(sorted, found)):
        only = [
            sorted(set().union(*a) - set().union(*b))[:3] for a, b in ((expected, found), (found, expected))
        ]
        raise CheckpointMismatchError(
            f"expected an optimizer with parameter groups of {[len(group) for group in expected]} "
            f"parameters, found {[len(group) for group in found]} in the checkpoint"
            + (f"; only here: {only[0]}" if only[0] else "")
            + (f"; only in the checkpoint: {only[1]}" if only[1] else "")
        )
    if unknown := {wanted.first_name(path[0]) for path in (*saved.paths.values(), *saved.plain)}.difference(
        *expected
    ):
        raise CheckpointMismatchError(
            f"expected the optimizer's state of parameters in its groups, found that of {sorted(unknown)[:3]}"
        )


# ---- stored plain data, which may be forged: a hash can be computed anew ----------------------------


_DEEPEST = 50  # dicts in dicts of an optimizer's state; torch's own has two


def read_state(checkpoint: Path, metadata: Metadata, tensors: Iterable[str]) -> dict[str, Any]:
    """Read what save_distributed stored besides tensors.

    Args:
        tensors: the flat names of those that are in the checkpoint.

    Raises:
        CheckpointError: it is something else.
    """
    plain, tensors = read_plain(checkpoint, metadata, PLAIN), set(tensors)
    problem = _types(plain, {"extra": (dict,), "state": (dict,), "per_rank": (list,), "optimizer": _OPTIONAL})
    if not problem and plain["optimizer"] is not None:
        problem = _plan_problem(plain["optimizer"], tensors)
    if not problem:
        problem = _places_problem(plain.get("sharded", {}), tensors, plain["state"], plain["per_rank"])
    if problem:
        raise CheckpointDamagedError(
            f"{checkpoint}: expected what save_distributed stores under {PLAIN!r}, {problem}"
        )
    return plain


def check_full(path: Path, content: dict[str, Any]) -> None:
    """Check that a file holds what save_full writes.

    Raises:
        CheckpointError: it is something else.
    """
    problem = _types(
        content,
        {
            "world_size": (int,),
            "about": (dict,),
            "tied": (dict,),
            "model": (dict,),
            "state": (dict,),
            "per_rank": (dict,),
            "optimizer": _OPTIONAL,
        },
    ) or _types(content["about"], {"model": (str,), "config": _OPTIONAL})
    if not problem and not all(type(name) is str for name in content["model"]):
        problem = "found names in the model that are no text"
    if not problem and not all(content["tied"].get(a) in content["model"] for a in content["tied"]):
        problem = "found names tied to what is not in the model"
    size = content["world_size"]
    if not problem and not all(type(v) is list and len(v) == size for v in content["per_rank"].values()):
        problem = f"found values that are not those of {size} ranks"
    if not problem and (optimizer := content["optimizer"]) is not None:
        problem = _types(optimizer, {"state": (dict,), "param_groups": (list,)})
        problem = problem or _groups_problem(optimizer["param_groups"], optimizer.get("group_counts", []))
        problem = problem or _tree_problem(optimizer["state"])
    sharded = content.get("sharded", {})
    if not problem and not (type(sharded) is dict and all(map(_is_pair, sharded.values()))):
        problem = "found a sharded tensor without a place"
    if not problem:
        tensors = {key for key, (_, tensor) in sharded.items() if isinstance(tensor, torch.Tensor)}
        places = {key: place for key, (place, _) in sharded.items()}
        problem = _places_problem(places, tensors, content["state"], content["per_rank"])
    if problem:
        raise CheckpointDamagedError(f"{path}: expected what save_full writes, {problem}")


_OPTIONAL = (dict, type(None))


def _types(value: Any, kinds: dict[str, tuple[type, ...]]) -> str:
    if type(value) is not dict:
        return f"found a {type(value).__name__}"
    for name, some in kinds.items():
        if name not in value or type(value[name]) not in some:
            found = f"a {type(value[name]).__name__}" if name in value else "nothing"
            return f"found {found} under {name!r}"
    return ""


def _is_pair(value: Any) -> bool:
    return type(value) is tuple and len(value) == 2


def _places_problem(places: Any, tensors: set[str], state: dict[str, Any], per_rank: Iterable[str]) -> str:
    """What is wrong with the places of the sharded tensors in the state."""
    if type(places) is not dict:
        return f"found a {type(places).__name__} under 'sharded'"
    for key, place in places.items():
        if key not in tensors:
            return f"found a place in the state for {key!r:.200}, which is no tensor of it"
        if not _is_pair(place) or type(place[0]) is not tuple or type(place[1]) is not list:
            return f"found no place in the state for {key!r:.200}"
        if not all(dim is None or type(dim) is int for dim in place[1]):
            return f"found no dimensions that {key!r:.200} was sharded by"
    own = set(per_rank)  # the state of which only the ranks know
    common = {key: place for key, place in places.items() if not (place[0] and place[0][0] in own)}
    try:
        insert_sharded(state, dict.fromkeys(common, torch.empty(0)), common)
    except CheckpointError as error:
        return str(error)
    return ""


def _plan_problem(plan: dict[str, Any], tensors: set[str]) -> str:
    if problem := _types(plan, {"groups": (list,), "paths": (dict,), "plain": (dict,)}):
        return f"{problem} of the optimizer"
    if plan.keys() - {"group_counts"} != {"groups", "paths", "plain"}:
        return f"found {sorted(map(str, plan))[:5]} of the optimizer"
    if not tensors >= plan["paths"].keys():
        return "found a state of the optimizer that is not in the checkpoint"
    if not all(
        type(path) is tuple and 0 < len(path) <= _DEEPEST
        for path in (*plan["paths"].values(), *plan["plain"])
    ):
        return "found a state of the optimizer without a place"
    if problem := _groups_problem(plan["groups"], plan.get("group_counts", [])):
        return problem
    try:
        OptimizerPlan(**plan).whole(dict.fromkeys(plan["paths"], torch.empty(0)))
    except Exception as error:
        return f"found a state of the optimizer in the place of another ({type(error).__name__})"
    return ""


def _groups_problem(groups: list[Any], counts: Any) -> str:
    for group in groups:
        if problem := _types(group, {"params": (list,)}):
            return f"{problem} of a parameter group"
        if not all(type(name) is str for name in group["params"]):
            return "found names of parameters that are no text"
    if type(counts) is not list or not all(type(count) is int and count >= 0 for count in counts):
        return "found no numbers of parameter groups"
    if counts and sum(counts) != len(groups):
        return f"found {len(groups)} parameter groups of optimizers that have {sum(counts)}"
    return ""


def _tree_problem(tree: dict[Any, Any]) -> str:
    """Refuse a dict that is in several places: walking it would take as long as there are ways to it."""
    seen, level = {id(tree)}, [tree]
    for _ in range(_DEEPEST):
        level = [value for one in level for value in one.values() if isinstance(value, dict)]
        if not level:
            return ""
        if len(seen | set(map(id, level))) < len(seen) + len(level):
            return "found a state of the optimizer that is in several places"
        seen.update(map(id, level))
    return f"found a state of the optimizer of more than {_DEEPEST} levels"
