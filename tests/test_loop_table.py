"""The lines of lesson 0's table "In your loop": evidence that the right column does what it says."""

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from fsdp_utils import run_on_ranks

WORLD, SAMPLES, EPOCHS = 2, 11, 2


def loop() -> tuple[list[list[int]], float, set[type], bool]:
    """A rank's samples by epoch, the clipped norm, the state dict's types, whether weights changed."""
    torch.manual_seed(0)
    model = fully_shard(nn.Linear(4, 4))
    before = model.weight.full_tensor().clone()
    optimizer = torch.optim.AdamW(model.parameters())
    data = TensorDataset(torch.arange(SAMPLES), torch.ones(SAMPLES, 4))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=SAMPLES, sampler=sampler)
    epochs = []
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for numbers, x in loader:
            epochs.append(numbers.tolist())
            model(x).square().sum().backward()
            norm = clip_grad_norm_(model.parameters(), 1.0)
            assert isinstance(norm, DTensor)
            optimizer.step()
            clipped = norm.full_tensor().item()
            optimizer.zero_grad()
    changed = not torch.equal(model.weight.full_tensor(), before)
    return epochs, clipped, {type(value) for value in model.state_dict().values()}, changed


def test_the_loop_of_lesson_0_has_equal_shares_one_norm_and_shards_in_its_state_dict() -> None:
    (ours, norm, types, changed), (theirs, other, *_) = run_on_ranks(loop, world_size=WORLD, timeout=100)
    assert norm == other > 1
    assert types == {DTensor}
    assert changed
    for mine, yours in zip(ours, theirs, strict=True):
        assert len(mine) == len(yours) == 6  # 11 samples: one is repeated
        assert {*mine, *yours} == {*range(SAMPLES)}
    assert ours[0] != ours[1]  # `set_epoch` draws another order
