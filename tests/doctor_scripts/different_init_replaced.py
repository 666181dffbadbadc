"""Rank 0 has the weights and the others have any; they are sent after sharding, or that is forgotten."""

import torch
from common import Decoder, run, sharded, start, train
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict


def main(faulty: bool) -> None:
    rank, _ = start()
    torch.manual_seed(rank)
    model = Decoder()
    weights = {name: value.clone() for name, value in model.state_dict().items()} if rank == 0 else {}
    sharded(model)
    if not faulty:
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_model_state_dict(model, weights, options=options)
    train(model)


run(main)
