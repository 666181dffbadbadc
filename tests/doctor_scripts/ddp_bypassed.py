"""The loss is computed by methods of DDP's module, so DDP's forward never runs (icefall#226)."""

from common import Decoder, next_token_loss, run, start, train
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel as DDP


def main(faulty: bool) -> None:
    start()
    model = DDP(Decoder())

    def loss_of(tokens: Tensor) -> Tensor:
        inner = model.module
        logits = inner.head(inner.encode(tokens)) if faulty else model(tokens)
        return next_token_loss(logits, tokens)

    train(model, loss_of=loss_of, limit=1.0)


run(main)
