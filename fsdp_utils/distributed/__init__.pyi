from fsdp_utils.distributed.agreement import agree as agree
from fsdp_utils.distributed.identity import get_local_rank as get_local_rank
from fsdp_utils.distributed.identity import get_rank as get_rank
from fsdp_utils.distributed.identity import get_world_size as get_world_size
from fsdp_utils.distributed.identity import rank0_first as rank0_first
from fsdp_utils.distributed.identity import sampler as sampler
from fsdp_utils.distributed.launch import run_on_ranks as run_on_ranks
