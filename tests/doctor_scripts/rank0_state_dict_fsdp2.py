"""Only rank 0 calls get_model_state_dict, whose gathers the other ranks never join (FSDP2)."""

import tempfile

import torch
from common import Decoder, counting, cpu_mesh, next_token_loss, run, say, start
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard


def main(faulty: bool) -> None:
    rank, _ = start(seconds=8)
    mesh = cpu_mesh()
    model = Decoder()
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    for step, tokens in enumerate(counting(32, seed=rank).split(4)):
        loss = next_token_loss(model(tokens), tokens)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        say(step, loss)
        if step % 2 == 1 and (rank == 0 or not faulty):
            state = get_model_state_dict(model, options=options)
            if rank == 0:
                with tempfile.TemporaryFile() as file:
                    torch.save(state, file)


if __name__ == "__main__":
    run(main)
