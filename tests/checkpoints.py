"""What the tests of checkpoints share: a small model with all that is hard to save, and its training."""

import hashlib
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from fsdp_utils import CheckpointError
from fsdp_utils.checkpoint.state import quiet

WORDS, WIDTH, BATCH = 11, 6, 12


class Block(nn.Module):
    scale: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 7)  # 7 rows do not divide among 2 or 3 ranks
        self.norm = nn.LayerNorm(7)
        self.down = nn.Linear(7, width)
        self.register_buffer("scale", torch.rand(3))
        self.register_buffer("cache", torch.rand(2), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.norm(self.up(x)).relu()) * self.scale.sum()


class Net(nn.Module):
    """Tied weights, buffers of both sorts, and a state of its own that is no tensor."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, width)
        self.blocks = nn.Sequential(Block(width), Block(width))
        self.head = nn.Linear(width, WORDS, bias=False)
        self.head.weight = self.embed.weight
        self.seen = 0

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        return self.head(self.blocks(self.embed(x)))

    def get_extra_state(self) -> dict[str, int]:
        return {"seen": self.seen}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.seen = state["seen"]


KINDS = ("fsdp2", "fsdp1", "fsdp1 with use_orig_params", "ddp")


def build(kind: str, *, seed: int = 0, width: int = WIDTH) -> tuple[Any, Optimizer]:
    """The model in that wrapper ("none" for none), and its optimizer with two groups."""
    torch.manual_seed(seed)
    model: Any = Net(width)
    if kind == "fsdp2":
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
    elif kind.startswith("fsdp1"):
        with quiet():
            model = FSDP1(
                model,
                auto_wrap_policy=ModuleWrapPolicy({Block}),
                use_orig_params="use_orig_params" in kind,
                device_id=torch.device("cpu"),
            )
    elif kind == "ddp":
        model = DistributedDataParallel(model)
    blocks = [param for name, param in model.named_parameters() if "blocks" in name]
    others = [param for name, param in model.named_parameters() if "blocks" not in name]
    return model, torch.optim.AdamW([{"params": blocks}, {"params": others, "lr": 3e-2}], lr=1e-2)


class Data:
    """An endless, shuffled stream of words, cut among the ranks; its place is a generator's state."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(7)

    def next(self) -> Tensor:
        """This rank's part of the next batch. i64[BATCH / ranks]"""
        batch = torch.randint(0, WORDS, (BATCH,), generator=self.generator)
        return batch.chunk(world_size())[rank()]


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def train(model: nn.Module, optimizer: Optimizer, data: Data, steps: int) -> list[float]:
    """The loss of each step, averaged over the ranks."""
    losses = []
    for _ in range(steps):
        words = data.next()
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(words), (words + 1) % WORDS)
        loss.backward()
        optimizer.step()
        mean = loss.detach().clone()
        if dist.is_initialized():
            dist.all_reduce(mean)
        losses.append(mean.item() / world_size())
    return losses


def fingerprint(model: nn.Module, optimizer: Optimizer | None = None) -> str:
    """The same as long as not a bit of this rank's parameters, buffers and optimizer state changes."""
    tensors = [*model.parameters(), *model.buffers()]
    if optimizer is not None:
        for state in optimizer.state.values():
            tensors += [value for value in state.values() if isinstance(value, Tensor)]
    digest = hashlib.sha256()
    for tensor in tensors:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        digest.update(local.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    if optimizer is not None:
        groups = [{**group, "params": None} for group in optimizer.param_groups]
        digest.update(repr(groups).encode())
    return digest.hexdigest()


class Outcome(NamedTuple):
    """How a call ended on one rank."""

    error: str | None
    seconds: float


def outcome(call: Callable[[], object]) -> Outcome:
    start, error = time.monotonic(), None
    try:
        call()
    except CheckpointError as caught:
        error = str(caught)
    return Outcome(error, time.monotonic() - start)
