"""checkpoint_wrapper is put around FSDP1's units and not inside them."""

import torch
from common import CPU, Block, Decoder, counting, next_token_loss, run, say, start
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import ModuleWrapPolicy


def main(faulty: bool) -> None:
    rank, _ = start()
    model = Decoder()
    policy = ModuleWrapPolicy({Block})
    model = FSDP(model, auto_wrap_policy=policy, device_id=CPU, use_orig_params=True)
    units = {module for module in model.modules() if isinstance(module, FSDP)} - {model}
    apply_activation_checkpointing(
        model,
        checkpoint_wrapper_fn=checkpoint_wrapper,
        check_fn=lambda module: module in units if faulty else isinstance(module, Block),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for step, tokens in enumerate(counting(32, seed=rank).split(4)):
        loss = next_token_loss(model(tokens), tokens)
        loss.backward()
        model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        say(step, loss)


if __name__ == "__main__":
    run(main)
