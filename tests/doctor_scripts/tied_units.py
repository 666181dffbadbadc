"""Embedding and head share one weight but are two units of FSDP1, which unties them without a message.

See Automodel#2213.
"""

from common import Block, Decoder, run, start, train, with_fsdp1
from torch import nn


def main(faulty: bool) -> None:
    start()
    model = Decoder()
    model.head.weight = model.embedding.weight
    train(with_fsdp1(model, Block, *([nn.Embedding] if faulty else [])), limit=1.0)


run(main)
