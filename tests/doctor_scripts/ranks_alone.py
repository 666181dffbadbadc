"""Accelerate was not told to use the CPU, so on a machine without a GPU it does not join the ranks."""

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from common import Decoder, counting, next_token_loss, run
from torch.utils.data import DataLoader, TensorDataset


def main(faulty: bool) -> None:
    torch.manual_seed(0)
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
    accelerator = Accelerator(cpu=not faulty, fsdp_plugin=plugin)
    model = Decoder()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    loader = DataLoader(TensorDataset(counting(64)), batch_size=4)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for step, (tokens,) in enumerate(loader):
        loss = next_token_loss(model(tokens), tokens)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        accelerator.print(f"step {step}: loss {loss.item():.4f}")


run(main)
