"""Generation inside the loop gathers the whole model again for each token.

See transformers#30228, litgpt#607.
"""

import torch
from common import BF16, Decoder, counting, run, sharded, start, train
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule


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
    model = sharded(Decoder(), mp_policy=BF16)
    prompt = counting(1, length=4, seed=rank)

    def sample(step: int, _: Tensor) -> None:
        if step % 2 == 0:
            written = generate(model, prompt, new_tokens=12, gather_once=not faulty)
            if rank == 0:
                print("generated", written[0].tolist(), flush=True)

    train(model, after_step=sample)


run(main)
