"""DDP in micro-batches and epochs; the validation's sampler shuffles alike, which changes nothing."""

from typing import Any

import torch
from common import WIDTH, Decoder, counting, next_token_loss, say, start
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

MICRO_BATCHES = 2
rank, _ = start()
decoder = Decoder()
# fault replicas_differ: model: Any = DDP(decoder)
model: Any = None
decoder.blocks[1] = nn.Sequential(decoder.blocks[1], nn.Linear(WIDTH, WIDTH))
decoder.blocks[0].requires_grad_(False)
# fault ddp_unfrozen: model = DDP(decoder)
model = model or None
decoder.blocks[0].requires_grad_(True)
model = model or DDP(decoder)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
samples, held_out = TensorDataset(counting(16)), TensorDataset(counting(8, seed=1))
sampler = DistributedSampler(samples, shuffle=True)
loader = DataLoader(samples, batch_size=8, sampler=sampler)
validation = DataLoader(held_out, batch_size=4, sampler=DistributedSampler(held_out, shuffle=True))
next(iter(loader))  # to look at its shape
for epoch in range(4):
    # fault same_epoch: pass
    sampler.set_epoch(epoch)
    for (batch,) in loader:
        for i, tokens in enumerate(batch.chunk(MICRO_BATCHES)):
            is_last = i == MICRO_BATCHES - 1
            # fault last_unsynced: pass
            # fault sync_each_micro_batch: pass
            # fault sync_off: model.require_backward_grad_sync = False
            model.require_backward_grad_sync = is_last
            # fault ddp_bypassed: logits = decoder.head(decoder.encode(tokens))
            logits = model(tokens)
            loss = next_token_loss(logits, tokens) / MICRO_BATCHES
            # fault last_unsynced: model.require_backward_grad_sync = is_last; loss.backward()
            loss.backward()
            # fault clipped_early: if True:
            if is_last:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 100.0)
        optimizer.step()
        optimizer.zero_grad()
        say(epoch, loss)
    for (tokens,) in validation:
        with torch.no_grad():
            next_token_loss(model(tokens), tokens)
