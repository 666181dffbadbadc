"""What the tests of record_collectives share: small models under FSDP1 and FSDP2, and a recorded step."""

from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import MixedPrecision, MixedPrecisionPolicy, fully_shard

from fsdp_utils import record_collectives
from fsdp_utils.collectives import CollectiveTrace

BF16 = torch.bfloat16
LAYERS = 4


class Model(nn.Module):
    """Layers that are units, and a head that stays in the root's unit. No size is a multiple of 2, 3 or 4."""

    def __init__(self, width: int = 7, head: bool = True) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(LAYERS))
        self.head = nn.Linear(width, 5) if head else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def fsdp1(model: Model, *, bf16: bool = False, **options: Any) -> FSDP:
    """Each layer a unit, then the model."""
    if bf16:
        options["mixed_precision"] = MixedPrecision(param_dtype=BF16, reduce_dtype=BF16)
    options["device_id"] = torch.device("cpu")
    model.layers = nn.ModuleList(FSDP(layer, **options) for layer in model.layers)
    return FSDP(model, **options)


def fsdp2(model: Model, *, bf16: bool = False, reshard_root: bool = True, **options: Any) -> Model:
    """Each layer a unit, then the model."""
    if bf16:
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=BF16)
    for layer in model.layers:
        fully_shard(layer, **options)
    if not reshard_root:
        options.pop("reshard_after_forward")
    fully_shard(model, **options)
    return model


def step(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> float:
    loss = model(torch.ones(3, 7)).sum()
    loss.backward()
    if optimizer is not None:
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


def record(model: nn.Module, **options: Any) -> CollectiveTrace:
    """The second step: the first one also sets FSDP up."""
    step(model)
    with record_collectives(model, **options) as trace:
        step(model)
    return trace


def by_unit(trace: CollectiveTrace) -> dict[str, list[tuple[str, str, int, int]]]:
    """By unit: kind, phase, bytes in and bytes out of its collectives, sorted."""
    seen: dict[str, list[tuple[str, str, int, int]]] = {}
    for event in trace.collectives:
        seen.setdefault(event.module, []).append((event.kind, event.phase, event.bytes_in, event.bytes_out))
    return {unit: sorted(calls) for unit, calls in seen.items()}


def order(trace: CollectiveTrace) -> list[str]:
    """What was issued, in words such as "all_gather layers.3"."""
    return [f"{event.kind} {event.module}".rstrip() for event in trace.events if event.kind != "free"]
