"""Every linear layer and norm is a unit of its own: many small all-gathers, which hide nothing.

See WeatherGenerator#2579.
"""

from common import BF16, Decoder, counting, run, sharded, start, train
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main(faulty: bool) -> None:
    start()
    model = Decoder(blocks=4)
    small = [module for module in model.blocks.modules() if isinstance(module, (nn.Linear, nn.LayerNorm))]
    sharded(model, blocks=small if faulty else model.blocks, mp_policy=BF16)
    samples = TensorDataset(counting(64))
    loader = DataLoader(samples, batch_size=4, sampler=DistributedSampler(samples, drop_last=True))
    train(model, batches=(tokens for (tokens,) in loader))


run(main)
