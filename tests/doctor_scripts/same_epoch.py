"""set_epoch is never called, so each epoch has the batches of the first (ParallelWaveGAN#177).

The validation's sampler shuffles alike, which changes nothing.
"""

import torch
from common import Decoder, counting, next_token_loss, run, say, start
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main(faulty: bool) -> None:
    start()
    model = DDP(Decoder())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    samples, held_out = TensorDataset(counting(8)), TensorDataset(counting(8, seed=1))
    sampler = DistributedSampler(samples, shuffle=True)
    loader = DataLoader(samples, batch_size=4, sampler=sampler)
    validation = DataLoader(held_out, batch_size=4, sampler=DistributedSampler(held_out, shuffle=True))
    next(iter(loader))  # to look at its shape
    for epoch in range(4):
        if not faulty:
            sampler.set_epoch(epoch)
        for (tokens,) in loader:
            loss = next_token_loss(model(tokens), tokens)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            say(epoch, loss)
        for (tokens,) in validation:
            with torch.no_grad():
                next_token_loss(model(tokens), tokens)


run(main)
