"""A layer is added after DDP has wrapped the model, so DDP does not average its gradients."""

import torch
from common import WIDTH, Decoder, counting, next_token_loss, run, say, start
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def main(faulty: bool) -> None:
    rank, _ = start()
    decoder = Decoder(blocks=2)
    longer = nn.Sequential(decoder.blocks[1], nn.Linear(WIDTH, WIDTH))
    if not faulty:
        decoder.blocks[1] = longer
    model = DDP(decoder)
    if faulty:
        decoder.blocks[1] = longer
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for step, tokens in enumerate(counting(32, seed=rank).split(4)):
        loss = next_token_loss(model(tokens), tokens)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        say(step, loss)


if __name__ == "__main__":
    run(main)
