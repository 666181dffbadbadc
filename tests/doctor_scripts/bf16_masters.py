"""The trained parameters are bfloat16 themselves, so small updates are rounded away.

See accelerate#2624, trl#1224.
"""

import torch
from common import BF16, Decoder, run, sharded, start, train


def main(faulty: bool) -> None:
    start()
    model = Decoder()
    if faulty:
        model = model.to(torch.bfloat16)
    sharded(model, mp_policy=BF16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / 8)
    train(model, optimizer, after_step=lambda *_: schedule.step(), limit=1.0)


run(main)
