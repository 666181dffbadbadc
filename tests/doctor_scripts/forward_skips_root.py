"""The loop calls model.forward(x), not model(x): no hook of the root runs, and each unit acts as a root.

See WeatherGenerator#1639.
"""

from common import VOCABULARY, WIDTH, Block, next_token_loss, run, sharded, start, train
from torch import nn


def main(faulty: bool) -> None:
    start()
    head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY))
    model = nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), Block(), Block(), Block(), head)
    sharded(model, blocks=model)
    call = model.forward if faulty else model
    train(model, loss_of=lambda tokens: next_token_loss(call(tokens), tokens), limit=1.0)


run(main)
