"""checkpoint_wrapper is put around FSDP1's units and not inside them."""

from common import Block, Decoder, run, start, train, with_fsdp1
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.distributed.fsdp import FullyShardedDataParallel


def main(faulty: bool) -> None:
    start()
    model = with_fsdp1(Decoder(), use_orig_params=True)
    units = {module for module in model.modules() if isinstance(module, FullyShardedDataParallel)} - {model}
    apply_activation_checkpointing(
        model,
        checkpoint_wrapper_fn=checkpoint_wrapper,
        check_fn=lambda module: module in units if faulty else isinstance(module, Block),
    )
    train(model)


run(main)
