"""No rank sends anything; the right twin averages the gradients itself, without FSDP or DDP."""

import torch
import torch.distributed as dist
from common import Decoder, counting, next_token_loss, run, say, start


def main(faulty: bool) -> None:
    rank, world = start()
    model = Decoder()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for step, tokens in enumerate(counting(32, seed=rank).split(4)):
        total = torch.zeros(())
        for half in tokens.chunk(2):
            loss = next_token_loss(model(half), half) / 2
            loss.backward()
            total += loss.detach()
        if not faulty:
            gradients = [p.grad for p in model.parameters() if p.grad is not None]
            flat = torch.cat([one.flatten() for one in gradients])
            dist.all_reduce(flat)
            means = (flat / world).split([one.numel() for one in gradients])
            for one, mean in zip(gradients, means, strict=True):
                one.copy_(mean.view_as(one))
        optimizer.step()
        optimizer.zero_grad()
        say(step, total)


run(main)
