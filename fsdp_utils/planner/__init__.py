"""How much memory and time on GPUs that I don't have? See `plan` and `search`."""

from fsdp_utils.planner.gpus import GPU, GPUS
from fsdp_utils.planner.memory import Moment
from fsdp_utils.planner.planning import Plan, plan
from fsdp_utils.planner.search import SearchResult, search

__all__ = ["GPU", "GPUS", "Moment", "Plan", "SearchResult", "plan", "search"]
