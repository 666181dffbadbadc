"""Every rank writes the full state dict to one file (fairscale#844)."""

import tempfile
from pathlib import Path

import torch
from common import Decoder, counting, cpu_mesh, next_token_loss, run, say, start
from torch import distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard


def main(faulty: bool) -> None:
    rank, _ = start()
    mesh = cpu_mesh()
    model = Decoder()
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    with tempfile.TemporaryDirectory() as own:
        folders = [own]
        dist.broadcast_object_list(folders)
        for step, tokens in enumerate(counting(32, seed=rank).split(4)):
            loss = next_token_loss(model(tokens), tokens)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            say(step, loss)
            state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
            if rank == 0 or faulty:
                torch.save(state, Path(folders[0], f"step_{step}.pt"))
            torch.save(torch.get_rng_state(), Path(folders[0], f"random_{rank}.pt"))


if __name__ == "__main__":
    run(main)
