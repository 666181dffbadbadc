"""FSDP1's policy names a class that the model does not use, so the whole model is one unit."""

from common import Block, Decoder, cpu_mesh, run, start, train, with_fsdp1
from torch import nn


def main(faulty: bool) -> None:
    start()
    unit = nn.TransformerEncoderLayer if faulty else Block
    train(with_fsdp1(Decoder(), unit, device_mesh=cpu_mesh()))


run(main)
