"""What to change first, if it does not fit?"""

from typing import TYPE_CHECKING

from fsdp_utils.planner import work_items
from fsdp_utils.planner.memory import size_text

if TYPE_CHECKING:
    from fsdp_utils.planner.planning import Plan

_GROUPS = {
    "activations": (work_items.ACTIVATIONS, work_items.TEMPORARIES, work_items.INPUTS),
    "sharded": work_items.AT_REST,
    "whole": (
        work_items.GATHERED,
        work_items.GATHER_BUFFERS,
        work_items.WHOLE_GRADIENTS,
        work_items.REDUCE_BUFFERS,
    ),
}


def advice(plan: "Plan") -> list[str]:
    """Sentences, the largest part of the peak first."""
    sizes = {name: sum(plan.breakdown.get(c, 0.0) for c in group) for name, group in _GROUPS.items()}
    excess = plan.peak_reserved_gib - plan.available_gib
    texts = [f"{size_text(excess)} too much is reserved"]
    for name, size in sorted(sizes.items(), key=lambda pair: -pair[1]):
        texts += [f"{size_text(size)}: {text}" for text in _WAYS[name](plan)[:1]]
    return texts


def _activations(plan: "Plan") -> list[str]:
    setting = plan.setting
    ways = []
    if setting.checkpointing == "none":
        ways.append('activations; checkpointing="full" keeps one input of each block')
    if setting.batch_size > 1:
        ways.append(f"activations; {setting.batch_size} samples at a time on a rank can be fewer")
    ways.append("activations of a single sample; a shorter sequence, or context parallelism")
    return ways


def _sharded(plan: "Plan") -> list[str]:
    ways = []
    if plan.setting.strategy == "hybrid":
        ways.append('shards; strategy="full" shares them among all ranks instead of those of a host')
    ways.append("shards; twice the ranks halve them")
    if not plan.offload:
        ways.append("shards; offload=True moves them to the host")
    return ways


def _whole(plan: "Plan") -> list[str]:
    if plan.setting.strategy == "grad_op":
        return ['whole units; strategy="full" frees them after forward']
    return ["whole units; smaller units, or tensor parallelism"]


_WAYS = {"activations": _activations, "sharded": _sharded, "whole": _whole}
