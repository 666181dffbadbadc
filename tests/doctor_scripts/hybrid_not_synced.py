"""The two replicas of FSDP1's HYBRID_SHARD start from different weights.

OLMo-core#319, llm-foundry#830. Run on 4 ranks.
"""

import torch
from common import Decoder, cpu_mesh, run, start, train, with_fsdp1
from torch.distributed.fsdp import ShardingStrategy


def main(faulty: bool) -> None:
    rank, world = start()
    shards = world // 2
    if faulty:
        torch.manual_seed(42 + rank // shards)  # one seed for each host
    hybrid = {"device_mesh": cpu_mesh(2, shards), "sharding_strategy": ShardingStrategy.HYBRID_SHARD}
    train(with_fsdp1(Decoder(), use_orig_params=True, **hybrid), limit=1.0)


run(main)
