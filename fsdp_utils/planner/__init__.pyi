from fsdp_utils.planner.gpus import GPU as GPU
from fsdp_utils.planner.gpus import GPUS as GPUS
from fsdp_utils.planner.gpus import peak_flops as peak_flops
from fsdp_utils.planner.memory import Moment as Moment
from fsdp_utils.planner.planning import plan as plan
from fsdp_utils.planner.result import Plan as Plan
from fsdp_utils.planner.searching import SearchResult as SearchResult
from fsdp_utils.planner.searching import search as search
