"""Ranks average means of unequal numbers of labels: a label counts more where there are few.

See verl#5625, RL2#11.
"""

import torch
import torch.distributed as dist
from common import IGNORED, LENGTH, Decoder, counting, cpu_mesh, next_token_loss, run, say, start
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard


def padded(samples: int, rank: int) -> tuple[Tensor, Tensor]:
    """Tokens and labels of sequences of 4 to all tokens, those of one rank longer than those of the other."""
    tokens = counting(samples, seed=rank)
    generator = torch.Generator().manual_seed(rank)
    lengths = torch.randint(*((4, 8) if rank else (10, LENGTH + 1)), (samples, 1), generator=generator)
    padding = torch.arange(LENGTH) >= lengths
    return tokens.masked_fill(padding, 0), tokens.masked_fill(padding, IGNORED)


def main(faulty: bool) -> None:
    rank, world = start()
    mesh = cpu_mesh()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = Decoder()
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    inputs, targets = padded(32, rank)
    for step, (tokens, labels) in enumerate(zip(inputs.split(4), targets.split(4), strict=True)):
        logits = model(tokens)
        if faulty:
            loss = next_token_loss(logits, labels)
        else:
            count = (labels[:, 1:] != IGNORED).sum()
            dist.all_reduce(count)
            loss = next_token_loss(logits, labels, reduction="sum") * world / count  # FSDP divides by world
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        say(step, loss)


if __name__ == "__main__":
    run(main)
