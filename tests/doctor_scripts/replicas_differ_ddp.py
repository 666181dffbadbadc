"""A layer is added after DDP has wrapped the model, so DDP does not average its gradients."""

from common import WIDTH, Decoder, run, start, train
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def main(faulty: bool) -> None:
    start()
    decoder = Decoder()
    longer = nn.Sequential(decoder.blocks[1], nn.Linear(WIDTH, WIDTH))
    if not faulty:
        decoder.blocks[1] = longer
    model = DDP(decoder)
    if faulty:
        decoder.blocks[1] = longer
    train(model, limit=1.0)


run(main)
