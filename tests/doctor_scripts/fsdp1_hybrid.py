"""FSDP1's HYBRID_SHARD on 4 ranks (OLMo-core#319, llm-foundry#830)."""

import torch
from common import CPU, Block, Decoder, counting, cpu_mesh, next_token_loss, say, start
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

rank, world = start()
# fault hybrid_not_synced: torch.manual_seed(42 + rank // 2)  # one seed for each host
torch.manual_seed(42)
model = FullyShardedDataParallel(
    Decoder(),
    auto_wrap_policy=ModuleWrapPolicy({Block}),
    device_id=CPU,
    use_orig_params=True,
    device_mesh=cpu_mesh(2, world // 2),
    sharding_strategy=ShardingStrategy.HYBRID_SHARD,
)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
for step, tokens in enumerate(counting(32, seed=rank).split(4)):
    loss = next_token_loss(model(tokens), tokens)
    loss.backward()
    model.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.zero_grad()
    say(step, loss)
