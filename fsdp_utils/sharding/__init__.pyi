from fsdp_utils.sharding.blocks import transformer_block_classes as transformer_block_classes
from fsdp_utils.sharding.checks import check_sharding as check_sharding
from fsdp_utils.sharding.wrapping import shard as shard
