"""FSDP2 in bf16, with a sampler, a log of the mean loss, and checkpoints."""

from pathlib import Path

import torch
import torch.distributed as dist
from common import Decoder, counting, next_token_loss, sharded, start
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

rank, world = start(seconds=8)
# fault different_init: torch.manual_seed(1000 + rank)
torch.manual_seed(17)
# fault bf16_masters: model = Decoder(blocks=3).to(torch.bfloat16)
model = Decoder(blocks=3)
small = [one for one in model.blocks.modules() if isinstance(one, nn.Linear | nn.LayerNorm)]
# fault bf16_reduce: policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
# fault optimizer_before_shard: optimizer = torch.optim.AdamW(model.parameters())
optimizer = None
# fault one_unit: sharded(model, [], mp_policy=policy)
# fault small_units: sharded(model, small, mp_policy=policy)
sharded(model, model.blocks, mp_policy=policy)
optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=2e-5)
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / 8)
torch.manual_seed(1000 + rank)  # for dropout and the data
data = TensorDataset(counting(64))
# fault same_samples: loader = DataLoader(data, batch_size=4)
# fault unequal_samples: loader = DataLoader(TensorDataset(counting(41)[rank::world]), batch_size=4)
loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data, drop_last=True))
for step, (tokens,) in enumerate(loader):
    # fault forward_of_part: logits = model.head(model.encode(tokens))
    logits = model(tokens)
    loss = next_token_loss(logits, tokens)
    loss.backward()
    norm = torch.stack([p.grad.to_local().norm() for p in model.parameters()]).norm()  # of the rank's shards
    # fault local_clip: [p.grad.to_local().div_(10 * norm) for p in model.parameters()]
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    optimizer.zero_grad()
    schedule.step()
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    # fault rank0_state_dict: state = get_model_state_dict(model, options=options) if rank == 0 else None
    state = get_model_state_dict(model, options=options)
    # fault same_file: if True:
    if rank == 0:
        torch.save(state, Path(__file__).with_name("model.pt"))
    torch.save(torch.get_rng_state(), Path(__file__).with_name(f"random_{rank}.pt"))
    mean = loss.detach()
    # fault ranks_part: dist.all_reduce(mean) if rank == 0 else None
    dist.all_reduce(mean)
    if rank == 0:
        print(f"step {step}: loss {mean.item() / world:.4f}, norm {norm:.2f}", flush=True)
