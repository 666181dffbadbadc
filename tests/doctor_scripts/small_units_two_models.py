"""Two models in one container: every linear layer is a unit; in the right twin each block, and each model."""

from common import Decoder, next_token_loss, run, sharded, start, train
from torch import nn


def main(faulty: bool) -> None:
    start()
    model = nn.ModuleDict({"policy": Decoder(), "value": Decoder()})
    for part in model.values():
        layers = [module for module in part.blocks.modules() if isinstance(module, nn.Linear)]
        sharded(part, blocks=layers if faulty else part.blocks)
    train(model, loss_of=lambda tokens: sum(next_token_loss(part(tokens), tokens) for part in model.values()))


run(main)
