"""Accelerate in micro-batches, which was asked for FSDP and takes DDP on a machine without an accelerator."""

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from common import Decoder, counting, next_token_loss
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

MICRO_BATCHES = 2


class Noisy(Decoder):
    def forward(self, tokens: Tensor, noise: Tensor) -> Tensor:
        encoded = self.encode(tokens)
        return self.head(encoded + noise * torch.randn_like(encoded))


torch.manual_seed(0)
plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
accelerator = Accelerator(fsdp_plugin=plugin, gradient_accumulation_steps=MICRO_BATCHES)
model = Noisy()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
loader = DataLoader(TensorDataset(counting(64)), batch_size=4)
model, optimizer = accelerator.prepare(model, optimizer)
# fault same_samples: loader = DataLoader(TensorDataset(counting(64)), batch_size=4)
loader = accelerator.prepare(loader)
# fault same_input: pass
# fault same_samples: pass
torch.manual_seed(1 + accelerator.process_index)
for step, (tokens,) in enumerate(loader):
    with accelerator.accumulate(model):
        loss = next_token_loss(model(tokens, torch.rand(len(tokens), 1, 1)), tokens)
        # fault divided_twice: accelerator.backward(loss / MICRO_BATCHES)
        accelerator.backward(loss)
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    accelerator.print(f"step {step}: loss {loss.item():.4f}")
