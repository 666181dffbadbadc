"""Embedding and head share one weight but are two units of FSDP1, which unties them without a message.

See Automodel#2213.
"""

import torch
from common import CPU, Block, Decoder, counting, next_token_loss, run, say, start
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import ModuleWrapPolicy


def main(faulty: bool) -> None:
    rank, _ = start()
    model = Decoder()
    model.head.weight = model.embedding.weight
    units: set[type[nn.Module]] = {Block, nn.Embedding} if faulty else {Block}
    model = FSDP(model, auto_wrap_policy=ModuleWrapPolicy(units), device_id=CPU)
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
