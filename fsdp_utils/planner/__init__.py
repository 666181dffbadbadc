"""Predict memory and time on GPUs that you don't have. See `plan` and `search`.

As in `fsdp_utils` itself, a module is loaded when one of its names is first used.
"""

from typing import TYPE_CHECKING

from fsdp_utils._lazy import loader

if TYPE_CHECKING:
    from fsdp_utils.planner.efficiency import MEMORY_RANGE, STEP_RANGE, Efficiency
    from fsdp_utils.planner.gpus import GPU, GPUS, peak_flops
    from fsdp_utils.planner.memory import Moment
    from fsdp_utils.planner.planning import plan, search
    from fsdp_utils.planner.result import COLORS, Plan, SearchResult

_MODULE_OF = {
    **dict.fromkeys(["MEMORY_RANGE", "STEP_RANGE", "Efficiency"], "efficiency"),
    **dict.fromkeys(["GPU", "GPUS", "peak_flops"], "gpus"),
    "Moment": "memory",
    **dict.fromkeys(["plan", "search"], "planning"),
    **dict.fromkeys(["COLORS", "Plan", "SearchResult"], "result"),
}
__all__ = [
    "COLORS", "GPU", "GPUS", "MEMORY_RANGE", "STEP_RANGE", "Efficiency", "Moment", "Plan", "SearchResult",
    "peak_flops", "plan", "search",
]  # fmt: skip
__getattr__ = loader(__name__, _MODULE_OF)
