"""The data loader is not given to Accelerate's prepare, so every rank trains on the same samples."""

import torch
from common import Decoder, counting, next_token_loss, run, say, start
from common_accelerate import accelerator_on_cpus
from torch.utils.data import DataLoader, TensorDataset


def main(faulty: bool) -> None:
    start()
    accelerator = accelerator_on_cpus("Block")
    model = Decoder()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    loader = DataLoader(TensorDataset(counting(64)), batch_size=4, shuffle=True)
    if faulty:
        model, optimizer = accelerator.prepare(model, optimizer)
    else:
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    model.train()
    for step, (tokens,) in enumerate(loader):
        loss = next_token_loss(model(tokens), tokens)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        say(step, loss)


run(main)
