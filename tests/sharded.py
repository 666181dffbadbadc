"""What the tests of wrapping share: hand-written models, and one comparison of sharded with unsharded."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from fsdp_utils import check_sharding, shard

TwoRanks = Callable[..., list[Any]]


class Tiny(NamedTuple):
    """A tiny model of a family, a batch for it, and the names of its blocks as its own source has them."""

    make: Callable[[], nn.Module]
    batch: Callable[[], dict[str, Any]]
    blocks: set[str]
    number: int  # how many blocks the configuration asks for


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(x)


class HandWritten(nn.Module):
    """A language model as one writes it: the head has repeated Linears, the blocks hold Sequentials."""

    def __init__(self, *, tied: bool = False, vocabulary: int = 16) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, vocabulary, bias=False))
        if tied:
            self.head[1].weight = self.embedding.weight

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        return (self.head(x),)


def hand_written_batch() -> dict[str, Any]:
    return {"x": torch.arange(8).reshape(2, 4)}


def fsdp1(model: nn.Module, **options: Any) -> FullyShardedDataParallel:
    return FullyShardedDataParallel(model, device_id=torch.device("cpu"), **options)


def loss_of(output: Any) -> torch.Tensor:
    return output.loss if getattr(output, "loss", None) is not None else output[0].square().mean()


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def assert_trains_alike(
    make: Callable[[], nn.Module],
    batch: Callable[[], dict[str, Any]],
    units: int,
    *,
    problems: int = 0,
    **options: Any,
) -> None:
    """Hold a forward and a backward of the sharded model against the unsharded one's.

    All ranks see the same batch: averages are equal. `problems`: of check_sharding, once it is sharded.
    """

    def run(model: nn.Module) -> float:
        loss = loss_of(model(**batch()))
        loss.backward()
        return loss.item()

    torch.manual_seed(0)
    model = make().eval()
    loss = run(model)
    expected = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    assert len(check_sharding(model)) == 1
    shard(model, **options)
    assert sum(isinstance(module, FSDPModule) for module in model.modules()) == units
    assert all(isinstance(p, DTensor) for p in model.parameters())
    assert run(model) == pytest.approx(loss, rel=1e-5)
    grads = {name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}
    assert grads.keys() == expected.keys()
    differing = [n for n in expected if not torch.allclose(grads[n], expected[n], rtol=1e-4, atol=1e-6)]
    assert differing == []
    assert len(check_sharding(model)) == problems
