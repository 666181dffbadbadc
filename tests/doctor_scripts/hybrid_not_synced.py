"""The two replicas of FSDP1's HYBRID_SHARD start from different weights.

OLMo-core#319, llm-foundry#830. Run on 4 ranks.
"""

import torch
from common import CPU, Block, Decoder, counting, cpu_mesh, next_token_loss, run, say, start
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy


def main(faulty: bool) -> None:
    rank, world = start()
    shards = world // 2
    if faulty:
        torch.manual_seed(42 + rank // shards)  # one seed for each host
    model = FSDP(
        Decoder(),
        device_mesh=cpu_mesh(2, shards),
        sharding_strategy=ShardingStrategy.HYBRID_SHARD,
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        device_id=CPU,
        use_orig_params=True,
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for step, tokens in enumerate(counting(32, seed=rank).split(4)):
        optimizer.zero_grad()
        loss = next_token_loss(model(tokens), tokens)
        loss.backward()
        model.clip_grad_norm_(1.0)
        optimizer.step()
        say(step, loss)


if __name__ == "__main__":
    run(main)
