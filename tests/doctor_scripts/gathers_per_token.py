"""Generation inside the loop gathers the whole model again for each token.

See transformers#30228, litgpt#607.
"""

import torch
from common import Decoder, counting, cpu_mesh, next_token_loss, run, say, start
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard


@torch.no_grad()
def generate(model: nn.Module, tokens: Tensor, new_tokens: int, gather_once: bool) -> Tensor:
    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for unit in units if gather_once else ():
        unit.set_reshard_after_forward(False, recurse=False)
    for _ in range(new_tokens):
        following = model(tokens)[:, -1].argmax(-1, keepdim=True)
        tokens = torch.cat([tokens, following], dim=1)
    for unit in units if gather_once else ():
        unit.set_reshard_after_forward(unit is not model, recurse=False)  # the root's default is False
        unit.reshard()
    return tokens


def main(faulty: bool) -> None:
    rank, _ = start()
    mesh = cpu_mesh()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = Decoder()
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for step, tokens in enumerate(counting(24, seed=rank).split(4)):
        loss = next_token_loss(model(tokens), tokens)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        say(step, loss)
        if step % 2 == 0:
            written = generate(model, tokens[:1, :4], new_tokens=12, gather_once=not faulty)
            if rank == 0:
                print("generated", written[0].tolist(), flush=True)


if __name__ == "__main__":
    run(main)
