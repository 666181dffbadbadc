"""FSDP2 with checkpointed blocks, dropout, and labels of which one rank has more than the other."""

import torch
import torch.distributed as dist
from common import IGNORED, Decoder, counting, next_token_loss, say, sharded, start

LENGTH = 1024
rank, world = start()
# fault dropout_rng: checkpointed = {"use_reentrant": False, "preserve_rng_state": False}
# fault big_activation: checkpointed = {}
checkpointed = {"use_reentrant": False}
model = Decoder(width=64, dropout=0.1, **checkpointed)
sharded(model, model.blocks)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
torch.manual_seed(rank)  # each rank draws its own dropout masks
for step, tokens in enumerate(counting(8, LENGTH, seed=rank).split(2)):
    labels = tokens.masked_fill(torch.arange(LENGTH) >= LENGTH / (1 + rank), IGNORED)
    count = (labels[:, 1:] != IGNORED).sum()
    dist.all_reduce(count)
    logits = model(tokens)
    # fault unweighted_loss: loss = next_token_loss(logits, labels)
    loss = next_token_loss(logits, labels, reduction="sum") * world / count  # FSDP divides by world
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    say(step, loss)
