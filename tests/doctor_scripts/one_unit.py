"""The whole model is one unit, so every rank gathers all parameters at once.

See fairscale#1050.
"""

import torch
from common import Decoder, counting, cpu_mesh, next_token_loss, run, say, start
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main(faulty: bool) -> None:
    start()
    mesh = cpu_mesh()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = Decoder(blocks=4)
    for block in model.blocks:
        if not faulty:
            fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    samples = TensorDataset(counting(64))
    loader = DataLoader(samples, batch_size=4, sampler=DistributedSampler(samples, drop_last=True))
    for step, (tokens,) in enumerate(loader):
        loss = next_token_loss(model(tokens), tokens)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        say(step, loss)


if __name__ == "__main__":
    run(main)
