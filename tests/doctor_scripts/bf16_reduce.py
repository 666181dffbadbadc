"""Gradients are summed in bfloat16: without reduce_dtype, FSDP1 reduces in the dtype of the parameters."""

import functools

import torch
from common import CPU, Block, Decoder, counting, next_token_loss, run, say, start
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import MixedPrecision
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy


def main(faulty: bool) -> None:
    rank, _ = start()
    if faulty:
        precision = MixedPrecision(param_dtype=torch.bfloat16)
    else:
        precision = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = FSDP(
        Decoder(),
        auto_wrap_policy=functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Block}),
        mixed_precision=precision,
        device_id=CPU,
        use_orig_params=True,
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    data = counting(256, seed=rank)
    for step in range(6):
        tokens = data[4 * step : 4 * step + 4]
        loss = next_token_loss(model(tokens), tokens)
        loss.backward()
        norm = model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        say(step, loss, f"norm {norm.item():.4f}")


if __name__ == "__main__":
    run(main)
