"""How much memory and time on GPUs that I don't have? See `plan` and `search`.

As in `fsdp_utils` itself, a module is loaded when one of its names is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fsdp_utils.planner.gpus import GPU, GPUS
    from fsdp_utils.planner.memory import Moment
    from fsdp_utils.planner.planning import Plan, plan
    from fsdp_utils.planner.searching import SearchResult, search

__all__ = ["GPU", "GPUS", "Moment", "Plan", "SearchResult", "plan", "search"]
_MODULE_OF = {
    "GPU": "gpus",
    "GPUS": "gpus",
    "Moment": "memory",
    "Plan": "planning",
    "SearchResult": "searching",
    "plan": "planning",
    "search": "searching",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value
