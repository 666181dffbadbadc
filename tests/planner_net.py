"""A small network for the tests of the planner."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from tests.blocks import Block

SIZES: dict[str, Any] = {  # of a small transformer
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
}


class Net(nn.Module):
    def __init__(self, first: int = 5, second: int = 0, block: Callable[[int], nn.Module] = Block) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 32)
        self.first = nn.ModuleList(block(32) for _ in range(first))
        self.second = nn.Sequential(*(block(32) for _ in range(second)))
        self.head = nn.Linear(32, 64)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:  # i64[batch]
        x = self.embed(tokens)
        for block in self.first:
            x = block(x)
        return self.head(self.second(x))


def tokens(batch_size: int, seq_len: int | None) -> torch.Tensor:
    return torch.zeros(batch_size, dtype=torch.long)


def with_fsdp1(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return FullyShardedDataParallel(
        model,
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        use_orig_params=True,
        device_id=torch.device("cpu"),
        device_mesh=mesh,
        sharding_strategy=ShardingStrategy.FULL_SHARD,
        mixed_precision=MixedPrecision(torch.bfloat16),
    )
