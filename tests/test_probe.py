"""The probe's numbers, held against what can be worked out by hand for three layers on two ranks."""

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from fsdp_utils.lessons.probe import Probe
from tests.on_ranks import on_ranks

WIDTH = 8
LAYER_BYTES = WIDTH * WIDTH * 4


def probed(steps: int, sharded: bool) -> tuple[list[int], bool]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3)))
    model[0].requires_grad_(False)
    with Probe(model) as probe:
        if sharded:
            for layer in model:
                fully_shard(layer)
            fully_shard(model)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
        other = torch.optim.SGD(nn.Linear(2, 2).parameters())
        for _ in range(steps):
            model(torch.ones(2, WIDTH)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            other.step()
    optimizer.step()  # outside: not seen
    return probe.row(), probe.optimizer is optimizer


@on_ranks()
def test_what_is_held_sent_and_full_at_once() -> None:
    half = LAYER_BYTES // 2
    # a frozen layer has no gradient and no averages; its weight is not needed in backward, but is gathered
    expected = [3 * half, 2 * half, 4 * half, 6 * LAYER_BYTES, 2 * LAYER_BYTES, 2 * LAYER_BYTES]
    assert probed(4, True) == (expected, True)


def test_without_fsdp_and_without_enough_steps() -> None:
    held = [3 * LAYER_BYTES, 2 * LAYER_BYTES, 4 * LAYER_BYTES]
    assert probed(4, False) == ([*held, 0, 0, 0], True)
    assert probed(1, False) == ([0] * 6, True)
