"""Only rank 0 calls get_model_state_dict, whose gathers the other ranks never join (FSDP2)."""

import tempfile

import torch
from common import Decoder, run, sharded, start, train
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict


def main(faulty: bool) -> None:
    rank, _ = start(seconds=8)
    model = sharded(Decoder())
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)

    def save(step: int, _: Tensor) -> None:
        if step % 2 == 1 and (rank == 0 or not faulty):
            state = get_model_state_dict(model, options=options)
            if rank == 0:
                with tempfile.TemporaryFile() as file:
                    torch.save(state, file)

    train(model, after_step=save)


run(main)
