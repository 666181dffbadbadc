"""Is the plain data of a checkpoint what its readers rely on? Its hash may have been computed anew."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata

from fsdp_utils.checkpoint.errors import CheckpointError
from fsdp_utils.checkpoint.reader import read_plain
from fsdp_utils.checkpoint.sharded_state import put_back
from fsdp_utils.checkpoint.state import PLAIN, OptimizerPlan

_DEEPEST = 50  # dicts in dicts of an optimizer's state; torch's own has two


def read_state(checkpoint: Path, metadata: Metadata, tensors: Iterable[str]) -> dict[str, Any]:
    """What save_distributed stored besides tensors.

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
        raise CheckpointError(
            f"{checkpoint}: expected what save_distributed stores under {PLAIN!r}, {problem}"
        )
    return plain


def check_full(path: Path, content: dict[str, Any]) -> None:
    """Is it what save_full puts into a file?

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
        problem = problem or _groups_problem(optimizer["param_groups"]) or _tree_problem(optimizer["state"])
    sharded = content.get("sharded", {})
    if not problem and not (type(sharded) is dict and all(map(_is_pair, sharded.values()))):
        problem = "found a sharded tensor without a place"
    if not problem:
        tensors = {key for key, (_, tensor) in sharded.items() if isinstance(tensor, torch.Tensor)}
        places = {key: place for key, (place, _) in sharded.items()}
        problem = _places_problem(places, tensors, content["state"], content["per_rank"])
    if problem:
        raise CheckpointError(f"{path}: expected what save_full writes, {problem}")


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
        put_back(state, dict.fromkeys(common, torch.empty(0)), common)
    except CheckpointError as error:
        return str(error)
    return ""


def _plan_problem(plan: dict[str, Any], tensors: set[str]) -> str:
    if problem := _types(plan, {"groups": (list,), "paths": (dict,), "plain": (dict,)}):
        return f"{problem} of the optimizer"
    if plan.keys() != {"groups", "paths", "plain"}:
        return f"found {sorted(map(str, plan))[:5]} of the optimizer"
    if not tensors >= plan["paths"].keys():
        return "found a state of the optimizer that is not in the checkpoint"
    if not all(
        type(path) is tuple and 0 < len(path) <= _DEEPEST
        for path in (*plan["paths"].values(), *plan["plain"])
    ):
        return "found a state of the optimizer without a place"
    if problem := _groups_problem(plan["groups"]):
        return problem
    try:
        OptimizerPlan(**plan).whole(dict.fromkeys(plan["paths"], torch.empty(0)))
    except Exception as error:
        return f"found a state of the optimizer in the place of another ({type(error).__name__})"
    return ""


def _groups_problem(groups: list[Any]) -> str:
    for group in groups:
        if problem := _types(group, {"params": (list,)}):
            return f"{problem} of a parameter group"
        if not all(type(name) is str for name in group["params"]):
            return "found names of parameters that are no text"
    return ""


def _tree_problem(tree: dict[Any, Any]) -> str:
    """Dicts that are in several places at once would be as many as there are ways to them."""
    seen, level = {id(tree)}, [tree]
    for _ in range(_DEEPEST):
        level = [value for one in level for value in one.values() if isinstance(value, dict)]
        if not level:
            return ""
        if len(seen | set(map(id, level))) < len(seen) + len(level):
            return "found a state of the optimizer that is in several places"
        seen.update(map(id, level))
    return f"found a state of the optimizer of more than {_DEEPEST} levels"
