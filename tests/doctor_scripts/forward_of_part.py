"""The loss calls a part of the sharded model, whose embedding the root's hook would have gathered.

See WeatherGenerator#1639.
"""

from common import VOCABULARY, WIDTH, Block, next_token_loss, run, sharded, start, train
from torch import Tensor, nn


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), Block(), Block(), Block())
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.encoder(tokens)
        return hidden, self.head(hidden)


def main(faulty: bool) -> None:
    start()
    model = Model()
    sharded(model, model.encoder[1:])

    def loss_of(tokens: Tensor) -> Tensor:
        if faulty:
            hidden = model.encoder(tokens)
            logits = model.head(hidden)
        else:
            hidden, logits = model(tokens)
        return next_token_loss(logits, tokens) + 0.01 * hidden.square().mean()

    train(model, loss_of=loss_of, limit=1.0)


run(main)
