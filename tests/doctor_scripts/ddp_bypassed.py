"""The loss is computed by methods of DDP's module, so DDP's forward never runs (icefall#226)."""

import torch
from common import Decoder, counting, next_token_loss, run, say, start
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel as DDP


class Model(Decoder):
    def encode(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return x

    def predict(self, hidden: Tensor) -> Tensor:
        return self.head(self.norm(hidden))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.predict(self.encode(tokens))


def main(faulty: bool) -> None:
    rank, _ = start()
    model = DDP(Model(blocks=2))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for step, tokens in enumerate(counting(32, seed=rank).split(4)):
        inner = model.module
        logits = inner.predict(inner.encode(tokens)) if faulty else model(tokens)
        loss = next_token_loss(logits, tokens)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        say(step, loss)


if __name__ == "__main__":
    run(main)
