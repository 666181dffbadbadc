"""The optimizer is made before fully_shard and holds parameters that the model no longer has.

See accelerate#3394.
"""

import torch
from common import Decoder, counting, next_token_loss, run, say, sharded, start


def main(faulty: bool) -> None:
    rank, _ = start()
    model = Decoder()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    sharded(model)
    if not faulty:
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)

    for step, tokens in enumerate(counting(32, seed=rank).split(4)):
        optimizer.zero_grad()
        loss = next_token_loss(model(tokens), tokens)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        say(step, loss)


run(main)
