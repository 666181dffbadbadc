"""Each rank clips by the norm of its own shards, so the shards are scaled by different factors."""

import torch
from common import Decoder, counting, next_token_loss, run, say, sharded, start
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


def clip_by_hand(model: nn.Module, limit: float) -> Tensor:
    grads = [p.grad.to_local() for p in model.parameters() if isinstance(p.grad, DTensor)]
    norm = torch.stack([grad.norm() for grad in grads]).norm()
    for grad in grads:
        grad.mul_((limit / (norm + 1e-6)).clamp(max=1.0))
    return norm


def main(faulty: bool) -> None:
    rank, _ = start()
    model = sharded(Decoder())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step, tokens in enumerate(counting(32, seed=rank).split(4)):
        loss = next_token_loss(model(tokens), tokens)
        loss.backward()
        if faulty:
            norm = clip_by_hand(model, 1.0)
        else:
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        optimizer.step()
        optimizer.zero_grad()
        say(step, loss, f"norm {norm.item():.4f}")


run(main)
