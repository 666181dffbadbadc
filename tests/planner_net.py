"""What tests of the planner train, on real ranks too: it imports no more than these need."""

import dataclasses

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from fsdp_utils import shard
from fsdp_utils.planner import work_items
from fsdp_utils.planner.memory import moments_of
from fsdp_utils.planner.models import source_of
from fsdp_utils.planner.simulated_rank import Setting, mesh_of, run_steps
from fsdp_utils.planner.work_items import Recording

SETTING = Setting(8, 2, 16, "full", "fsdp2", "bf16", "none", "adamw", 4)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # f32[batch, width]
        return x + self.down(torch.relu(self.up(x)))


class Net(nn.Module):
    def __init__(self, width: int = 32, first: int = 5, second: int = 0) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, width)
        self.first = nn.ModuleList(Block(width) for _ in range(first))
        self.second = nn.Sequential(*(Block(width) for _ in range(second)))
        self.head = nn.Linear(width, 64)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:  # i64[batch]
        x = self.embed(tokens)
        for block in self.first:
            x = block(x)
        return self.head(self.second(x))


class WithoutRoot(nn.Module):
    """All parameters are in the blocks, so FSDP has nothing to gather for the root."""

    def __init__(self, width: int = 32, blocks: int = 6) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # f32[batch, width]
        for block in self.blocks:
            x = block(x)
        return x


def of_width(batch_size: int, seq_len: int | None) -> torch.Tensor:
    return torch.zeros(batch_size, 32)


def tokens(batch_size: int, seq_len: int | None) -> torch.Tensor:
    return torch.zeros(batch_size, dtype=torch.long)


def most_by_category(recording: Recording) -> dict[str, float]:
    """GiB, each category at its own peak in the second step."""
    moments = [moment for moment in moments_of(recording) if moment.step == 2]
    return {category: max(m.gib.get(category, 0.0) for m in moments) for category in work_items.CATEGORIES}


RANKS = 3  # by which none of Net's sizes divides: the shards of the last rank are smaller
REAL = {
    "full": dataclasses.replace(SETTING, world_size=RANKS),
    "ZeRO-2": dataclasses.replace(SETTING, world_size=RANKS, strategy="grad_op", precision="fp32"),
    "FSDP1": dataclasses.replace(SETTING, world_size=RANKS, api="fsdp1", checkpointing="full"),
    "selective": dataclasses.replace(SETTING, world_size=RANKS, checkpointing="selective"),
    "micro-batches": dataclasses.replace(SETTING, world_size=RANKS, micro_batches=2),
    "no_sync": dataclasses.replace(SETTING, world_size=RANKS, micro_batches=2, no_sync=True),
    "no_sync, FSDP1": dataclasses.replace(
        SETTING, world_size=RANKS, micro_batches=2, no_sync=True, api="fsdp1", checkpointing="every_2"
    ),
}


def train_really() -> tuple[dict[str, dict[str, float]], dict[str, float]]:
    """On real ranks: by setting, the recorded peaks by category; and bytes at rest as added up by hand."""
    recorded = {}
    for name, setting in REAL.items():
        # The second least of 5. Gloo's threads let go of buffers at moments of their own: on busy cores one
        # run in 15 had a category too large for that, and one in 240 whole gradients that were gone too soon.
        runs = [
            most_by_category(run_steps(source_of(Net()), setting, None, tokens, mesh_of(setting)))
            for _ in range(5)
        ]
        recorded[name] = {category: sorted(run[category] for run in runs)[1] for category in runs[0]}
    model = shard(Net(), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    model(tokens(2, None)).float().mean().backward()
    optimizer.step()
    counted = {
        work_items.PARAMETERS: [p.to_local() for p in model.parameters()],
        work_items.GRADIENTS: [p.grad.to_local() for p in model.parameters()],
        work_items.OPTIMIZER: [
            getattr(t, "_local_tensor", t) for state in optimizer.state.values() for t in state.values()
        ],
    }
    by_hand = {name: sum(t.nbytes for t in tensors) / 2**30 for name, tensors in counted.items()}
    return recorded, by_hand
