"""How much memory and time on GPUs that I don't have? See `plan` and `search`.

As in `fsdp_utils` itself, a module is loaded when one of its names is first used.
"""

from typing import TYPE_CHECKING

from fsdp_utils._lazy import loader

if TYPE_CHECKING:
    from fsdp_utils.planner.gpus import GPU, GPUS, peak_flops
    from fsdp_utils.planner.memory import Moment
    from fsdp_utils.planner.planning import plan
    from fsdp_utils.planner.result import Plan
    from fsdp_utils.planner.searching import SearchResult, search

__all__ = ["GPU", "GPUS", "Moment", "Plan", "SearchResult", "peak_flops", "plan", "search"]
_MODULE_OF = {
    "GPU": "gpus",
    "GPUS": "gpus",
    "Moment": "memory",
    "Plan": "result",
    "SearchResult": "searching",
    "peak_flops": "gpus",
    "plan": "planning",
    "search": "searching",
}
__getattr__ = loader(__name__, _MODULE_OF)
