"""Only rank 0 asks for the full state dict, whose gathers the other ranks never join (FSDP1)."""

import tempfile

import torch
from common import CPU, Block, Decoder, counting, next_token_loss, run, say, start
from torch.distributed.fsdp import FullStateDictConfig, StateDictType
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import ModuleWrapPolicy


def save(model: FSDP, rank: int, faulty: bool) -> None:
    config = FullStateDictConfig(rank0_only=True)
    with tempfile.TemporaryFile() as file, FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, config):
        if faulty:
            if rank == 0:
                torch.save(model.state_dict(), file)
        else:
            state = model.state_dict()
            if rank == 0:
                torch.save(state, file)


def main(faulty: bool) -> None:
    rank, _ = start(seconds=8)
    policy = ModuleWrapPolicy({Block})
    model = FSDP(Decoder(), auto_wrap_policy=policy, device_id=CPU, use_orig_params=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for step, tokens in enumerate(counting(32, seed=rank).split(4)):
        loss = next_token_loss(model(tokens), tokens)
        loss.backward()
        model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        say(step, loss)
        if step % 2 == 1:
            save(model, rank, faulty)


if __name__ == "__main__":
    run(main)
