"""What the tests of record_collectives share: small models, and what theory says of them."""

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    BackwardPrefetch,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

from fsdp_utils import record_collectives
from fsdp_utils.collectives import CollectiveTrace

CPU = torch.device("cpu")
BF16 = torch.bfloat16
LAYERS = 4
PREFETCH = {"none": None, "post": BackwardPrefetch.BACKWARD_POST, "pre": BackwardPrefetch.BACKWARD_PRE}


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
    options["device_id"] = CPU
    model.layers = nn.ModuleList(FSDP(layer, **options) for layer in model.layers)
    return FSDP(model, **options)


def fsdp2(model: Model, *, bf16: bool = False, **options: Any) -> Model:
    """Each layer a unit, then the model."""
    if bf16:
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=BF16)
    for layer in model.layers:
        fully_shard(layer, **options)
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


def short(trace: CollectiveTrace, phase: str) -> str:
    """The order in letters: AG, RS, AR, and mm for the computation of a unit."""
    letters = {"all_gather": "AG", "reduce_scatter": "RS", "all_reduce": "AR", "compute": "mm"}
    return " ".join(
        letters[event.kind]
        for event in trace.events
        if event.phase == phase and event.kind in letters and event.module != "(root)"
    )


def padded_fsdp1(shapes: list[tuple[int, ...]], ranks: int, itemsize: int) -> int:
    """A unit's parameters in one flat tensor, padded to a multiple of the ranks."""
    numel = sum(math.prod(shape) for shape in shapes)
    return math.ceil(numel / ranks) * ranks * itemsize


def padded_fsdp2(shapes: list[tuple[int, ...]], ranks: int, itemsize: int) -> int:
    """Each parameter padded to a multiple of the ranks in its first dimension."""
    rows = [math.ceil(shape[0] / ranks) * ranks * math.prod(shape[1:]) for shape in shapes]
    return sum(rows) * itemsize


LAYER = [(7, 7), (7,)]
HEAD = [(5, 7), (5,)]


def by_unit(trace: CollectiveTrace) -> dict[str, list[tuple[str, str, int, int]]]:
    """By unit: kind, phase, bytes in and bytes out of its collectives, sorted."""
    seen: dict[str, list[tuple[str, str, int, int]]] = {}
    for event in trace.collectives:
        seen.setdefault(event.module, []).append((event.kind, event.phase, event.bytes_in, event.bytes_out))
    return {unit: sorted(calls) for unit, calls in seen.items()}


def expected(padded: Any, *, ranks: int, itemsize: int, reshard: bool) -> dict[str, Any]:
    """What theory says of one step of Model: as `by_unit`."""
    units = {f"layers.{i}": (LAYER, reshard) for i in range(LAYERS)} | {"(root)": (HEAD, False)}
    seen = {}
    for name, (shapes, gathered_twice) in units.items():
        whole = padded(shapes, ranks, itemsize)
        gather = (whole // ranks, whole)
        calls = [("all_gather", "forward", *gather), ("reduce_scatter", "backward", whole, whole // ranks)]
        if gathered_twice:
            calls.append(("all_gather", "backward", *gather))
        seen[name] = sorted(calls)
    return seen


def mesh(*shape: int) -> Any:
    return init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])


STRATEGIES = {True: ShardingStrategy.FULL_SHARD, False: ShardingStrategy.SHARD_GRAD_OP}


def all_strategies() -> list[tuple[str, Any, Any]]:
    """FSDP1 and FSDP2, FULL_SHARD and SHARD_GRAD_OP, fp32 and bf16: name, recorded, expected."""
    ranks = dist.get_world_size()
    results = []
    for reshard in (True, False):
        for bf16 in (False, True):
            theory = {"ranks": ranks, "itemsize": 2 if bf16 else 4, "reshard": reshard}
            one = record(fsdp1(Model(), bf16=bf16, sharding_strategy=STRATEGIES[reshard]))
            name = f"reshard {reshard}, bf16 {bf16}"
            results.append((f"FSDP1, {name}", by_unit(one), expected(padded_fsdp1, **theory)))
            # The root frees nothing after forward by default; told to, it would.
            two = Model()
            options = {"mp_policy": MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=BF16)} if bf16 else {}
            for layer in two.layers:
                fully_shard(layer, reshard_after_forward=reshard, **options)
            fully_shard(two, **options)
            results.append((f"FSDP2, {name}", by_unit(record(two)), expected(padded_fsdp2, **theory)))
    return results
