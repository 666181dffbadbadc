"""FSDP1's policy names a class that the model does not use, so the whole model is one unit."""

import torch
from common import CPU, Block, Decoder, counting, cpu_mesh, next_token_loss, run, say, start
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import ModuleWrapPolicy


def main(faulty: bool) -> None:
    rank, _ = start()
    policy = ModuleWrapPolicy({nn.TransformerEncoderLayer if faulty else Block})
    model = FSDP(Decoder(), device_mesh=cpu_mesh(), auto_wrap_policy=policy, device_id=CPU)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for step, tokens in enumerate(counting(32, seed=rank).split(4)):
        loss = next_token_loss(model(tokens), tokens)
        loss.backward()
        model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        say(step, loss)


if __name__ == "__main__":
    run(main)
