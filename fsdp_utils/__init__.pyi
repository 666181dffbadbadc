"""The names of the library: type checkers read them here, and __init__.py loads each at its first use."""

from fsdp_utils.checkpoint import CheckpointError as CheckpointError
from fsdp_utils.checkpoint import checkpoints as checkpoints
from fsdp_utils.checkpoint import load_distributed as load_distributed
from fsdp_utils.checkpoint import save_distributed as save_distributed
from fsdp_utils.checkpoint import verify_checkpoint as verify_checkpoint
from fsdp_utils.child_tuning import ChildTuningAdamW as ChildTuningAdamW
from fsdp_utils.child_tuning import fisher_mask as fisher_mask
from fsdp_utils.collectives import check_in_step as check_in_step
from fsdp_utils.collectives import record_collectives as record_collectives
from fsdp_utils.distributed import get_local_rank as get_local_rank
from fsdp_utils.distributed import get_rank as get_rank
from fsdp_utils.distributed import get_world_size as get_world_size
from fsdp_utils.distributed import rank0_first as rank0_first
from fsdp_utils.distributed import run_on_ranks as run_on_ranks
from fsdp_utils.distributed import sampler as sampler
from fsdp_utils.memory import Memory_Maximizer as Memory_Maximizer
from fsdp_utils.memory import MemoryReport as MemoryReport
from fsdp_utils.memory import find_batch_size as find_batch_size
from fsdp_utils.migration import translate as translate
from fsdp_utils.planner import plan as plan
from fsdp_utils.precision import bf16_support as bf16_support
from fsdp_utils.pretrained import export_safetensors as export_safetensors
from fsdp_utils.pretrained import load_pretrained as load_pretrained
from fsdp_utils.sharding import check_sharding as check_sharding
from fsdp_utils.sharding import shard as shard
from fsdp_utils.sharding import transformer_block_classes as transformer_block_classes

__version__: str
