"""A small network for the tests of the planner, and its training on real ranks."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from fsdp_utils import shard
from fsdp_utils.allocator import record_allocations
from tests.blocks import Block

RANKS = 3  # by which none of Net's sizes divides: the shards of the last rank are smaller
SIZES: dict[str, Any] = {  # of a small transformer
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
}
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)


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


REAL: dict[str, dict[str, Any]] = {
    "full": {},
    "ZeRO-2 in fp32": {"strategy": "grad_op", "mp_policy": None},
    "checkpointed": {"checkpointing": "full"},
}


def train_really() -> tuple[dict[str, float], dict[str, int]]:
    """By setting, the peak in GiB of the second step's forward pass; and bytes at rest, added up by hand."""
    peaks = {}
    for name, options in REAL.items():
        # The second least of 5: gloo's threads let go of buffers at moments of their own.
        peaks[name] = sorted(_peak_in_forward(**options) for _ in range(5))[1]
    model = shard(Net(), mp_policy=BF16)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    model(tokens(2, None)).float().mean().backward()
    optimizer.step()
    counted: dict[str, Any] = {
        "parameters": [p.to_local() for p in model.parameters()],
        "gradients": [p.grad.to_local() for p in model.parameters()],
        "optimizer state": [
            getattr(t, "_local_tensor", t) for state in optimizer.state.values() for t in state.values()
        ],
    }
    return peaks, {name: sum(t.nbytes for t in tensors) for name, tensors in counted.items()}


def _peak_in_forward(mp_policy: MixedPrecisionPolicy | None = BF16, **options: Any) -> float:
    with record_allocations() as trace:
        model = shard(Net(), mp_policy=mp_policy, **options)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        model(tokens(2, None)).float().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        dist.barrier()
        before = len(trace.events)
        loss = model(tokens(2, None)).float().mean()
        after = len(trace.events)
        loss.backward()
    live = peak = 0
    for number, event in enumerate(trace.events[:after]):
        live += event.size if event.kind == "alloc" else -event.size
        peak = max(peak, live) if number >= before else 0
    return peak / 2**30
