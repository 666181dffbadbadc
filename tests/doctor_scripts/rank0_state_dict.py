"""Only rank 0 asks for the full state dict, whose gathers the other ranks never join (FSDP1)."""

import tempfile

import torch
from common import Decoder, run, start, train, with_fsdp1
from torch import Tensor
from torch.distributed.fsdp import FullStateDictConfig, StateDictType
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP


def main(faulty: bool) -> None:
    rank, _ = start(seconds=8)
    model = with_fsdp1(Decoder(), use_orig_params=True)
    config = FullStateDictConfig(rank0_only=True)

    def save(step: int, _: Tensor) -> None:
        if step % 2 == 0 or (faulty and rank != 0):
            return
        with tempfile.TemporaryFile() as file:
            with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, config):
                state = model.state_dict()
            if rank == 0:
                torch.save(state, file)

    train(model, after_step=save, limit=1.0)


run(main)
