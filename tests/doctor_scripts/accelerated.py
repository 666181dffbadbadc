"""Accelerate, which was asked for FSDP and takes DDP on a machine without an accelerator."""

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from common import Decoder, counting, next_token_loss
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
# fault ranks_alone: accelerator = Accelerator(fsdp_plugin=plugin)
accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
model = Decoder()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
loader = DataLoader(TensorDataset(counting(64)), batch_size=4)
model, optimizer = accelerator.prepare(model, optimizer)
# fault same_samples: loader = DataLoader(TensorDataset(counting(64)), batch_size=4)
loader = accelerator.prepare(loader)
for step, (tokens,) in enumerate(loader):
    loss = next_token_loss(model(tokens), tokens)
    accelerator.backward(loss)
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    accelerator.print(f"step {step}: loss {loss.item():.4f}")
