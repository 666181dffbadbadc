"""Every rank writes the full state dict to one file (fairscale#844)."""

import tempfile
from pathlib import Path

import torch
from common import Decoder, run, sharded, start, train
from torch import Tensor
from torch import distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict


def main(faulty: bool) -> None:
    rank, _ = start()
    model = sharded(Decoder())

    def save(step: int, _: Tensor) -> None:
        state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
        if rank == 0 or faulty:
            torch.save(state, Path(folders[0], f"step_{step}.pt"))
        torch.save(torch.get_rng_state(), Path(folders[0], f"random_{rank}.pt"))

    with tempfile.TemporaryDirectory() as own:
        folders = [own]
        dist.broadcast_object_list(folders)
        train(model, after_step=save)


run(main)
