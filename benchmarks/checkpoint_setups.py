"""Which set-ups of wrapper and optimizer come back bit by bit, on other numbers of ranks?

    python benchmarks/checkpoint_setups.py                # all: some 8 minutes on 2 cores
    python benchmarks/checkpoint_setups.py --only fsdp1   # those with that in their name

Each is trained for two steps on four ranks and saved by save_distributed; models of another seed load it on
four, two and three ranks. The reference is torch's own get_state_dict with full tensors, before the save and
after the load: equal in every bit, or not. A set-up is exact, refused in words (CheckpointError) at the save
or the load, not built (torch itself refuses it), or failed: different without a word, any other exception, or
a hang. Exits with 1 if any failed.
"""

import hashlib
import itertools
import logging
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from benchmarks.machine import describe, options, table
from fsdp_utils import CheckpointError, load_distributed, run_on_ranks, save_distributed

LIMIT_S = 60
EXACT, REFUSED, NOT_BUILT, FAILED = "exact", "refused", "not built", "failed"


class NotBuilt(Exception):
    """torch refuses the set-up before there is anything to save."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(8, 12), nn.LayerNorm(12), nn.Linear(12, 8, bias=False)
        self.register_buffer("scale", torch.rand(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # f32[batch, 8]
        return x + self.down(self.norm(self.up(x)).relu()) * self.scale.to(x.dtype)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.blocks = nn.Sequential(Block(), Block())
        self.head = nn.Linear(8, 5)  # 5 rows do not divide among 2, 3 or 4 ranks

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # f32[batch, 8]
        return self.head(self.blocks(self.first(x)))


# ---- the set-ups -----------------------------------------------------------------------------------


def _fsdp2(model: Net, **options: Any) -> nn.Module:
    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def _fsdp1(model: Net, strategy: str = "FULL_SHARD", **options: Any) -> nn.Module:
    return FullyShardedDataParallel(
        model,
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        sharding_strategy=ShardingStrategy[strategy],
        device_id=torch.device("cpu"),
        **options,
    )


def _mesh() -> Any:
    """Two by as many as there are; three ranks have no second dimension."""
    ranks = dist.get_world_size()
    if ranks % 2:
        raise NotBuilt(f"a mesh of 2 x {ranks / 2:g}")
    return init_device_mesh("cpu", (ranks // 2, 2), mesh_dim_names=("outer", "inner"))


def _two_dimensions(model: Net) -> nn.Module:
    mesh = _mesh()
    whole = Replicate()
    for block in model.blocks:
        plan = {"up": ColwiseParallel(output_layouts=whole), "down": RowwiseParallel(input_layouts=whole)}
        parallelize_module(block, mesh["inner"], plan)
    return _fsdp2(model, mesh=mesh["outer"])


def _frozen(model: Net) -> Net:
    model.first.requires_grad_(False)
    return model


WRAPPERS: dict[str, Callable[[Net], nn.Module]] = {
    "ddp": DistributedDataParallel,
    "fsdp1": _fsdp1,
    "fsdp1, original parameters": lambda model: _fsdp1(model, use_orig_params=True),
    "fsdp1, grad_op": lambda model: _fsdp1(model, "SHARD_GRAD_OP", use_orig_params=True),
    "fsdp1, no shard": lambda model: _fsdp1(model, "NO_SHARD", use_orig_params=True),
    "fsdp1, hybrid": lambda model: _fsdp1(model, "HYBRID_SHARD", use_orig_params=True, device_mesh=_mesh()),
    "fsdp2": _fsdp2,
    "fsdp2, kept after forward": lambda model: _fsdp2(model, reshard_after_forward=False),
    "fsdp2, mixed precision": lambda model: _fsdp2(
        model, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    ),
    "fsdp2, in bf16": lambda model: _fsdp2(model.bfloat16()),
    "fsdp2, frozen": lambda model: _fsdp2(_frozen(model)),
    "fsdp2, hybrid": lambda model: _fsdp2(model, mesh=_mesh()),
    "fsdp2, two dimensions": _two_dimensions,
    "fsdp2, compiled blocks": lambda model: _fsdp2(_compiled(model)),
    "fsdp2, ddp's replicate": lambda model: _replicated(model),
}


def _compiled(model: Net) -> Net:
    for block in model.blocks:
        block.compile(backend="eager")
    return model


def _replicated(model: Net) -> nn.Module:
    from torch.distributed._composable.replicate import replicate

    return replicate(model)


def _own_groups(model: nn.Module) -> Optimizer:
    """Biases without decay, as training has it."""
    vectors = [p for name, p in model.named_parameters() if name.endswith("bias")]
    others = [p for name, p in model.named_parameters() if not name.endswith("bias")]
    return torch.optim.AdamW([{"params": others}, {"params": vectors, "weight_decay": 0.0}], lr=0.01)


OPTIMIZERS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "SGD": lambda model: torch.optim.SGD(model.parameters(), lr=0.01),
    "SGD, momentum": lambda model: torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9),
    "Adam, amsgrad": lambda model: torch.optim.Adam(model.parameters(), lr=0.01, amsgrad=True),
    "AdamW": lambda model: torch.optim.AdamW(model.parameters(), lr=0.01),
    "AdamW, fused": lambda model: torch.optim.AdamW(model.parameters(), lr=0.01, fused=True),
    "AdamW, groups": _own_groups,
    "AdamW, lr as tensor": lambda model: torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.01)),
    "NAdam": lambda model: torch.optim.NAdam(model.parameters(), lr=0.01),
    "Adamax": lambda model: torch.optim.Adamax(model.parameters(), lr=0.01),
    "RMSprop, centered": lambda model: torch.optim.RMSprop(model.parameters(), lr=0.01, centered=True),
    "Adagrad": lambda model: torch.optim.Adagrad(model.parameters(), lr=0.01),
    "Adadelta": lambda model: torch.optim.Adadelta(model.parameters(), lr=0.01),
    "Rprop": lambda model: torch.optim.Rprop(model.parameters(), lr=0.01),
    "ASGD": lambda model: torch.optim.ASGD(model.parameters(), lr=0.01),
    "Adafactor": lambda model: torch.optim.Adafactor(model.parameters(), lr=0.01),
}


# ---- on the ranks ----------------------------------------------------------------------------------


def built(wrapper: str, optimizer: str, seed: int, steps: int) -> tuple[nn.Module, Optimizer]:
    """Trained for that many steps, each rank on its own samples."""
    warnings.simplefilter("ignore")
    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)
    torch.manual_seed(seed)
    try:
        model = WRAPPERS[wrapper](Net())
        chosen = OPTIMIZERS[optimizer](model)
        # ranks that share a tensor's parts get the same samples
        of = dist.get_rank() // 2 if wrapper == "fsdp2, two dimensions" else dist.get_rank()
        batches = torch.Generator().manual_seed(100 + of)
        for _ in range(steps):
            x = torch.randn(3, 8, generator=batches).to(next(model.parameters()).dtype)
            model(x).float().square().mean().backward()
            chosen.step()
            chosen.zero_grad()
    except Exception as error:
        raise NotBuilt(f"{type(error).__name__}: {error}") from error
    return model, chosen


def reference(model: nn.Module, optimizer: Optimizer) -> str:
    """A hash of all that torch's own get_state_dict gives of them, in full."""
    options = StateDictOptions(full_state_dict=True)  # with cpu_offload FSDP1 crashes on a CPU [torch 2.13]
    digest = hashlib.sha256()

    def add(value: Any, name: str) -> None:
        if isinstance(value, dict):
            for key in sorted(value, key=str):
                add(value[key], f"{name}.{key}")
        elif isinstance(value, torch.Tensor):
            digest.update(f"{name} {value.dtype} {list(value.shape)}".encode())
            digest.update(value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        else:
            digest.update(f"{name} {value!r}".encode())

    for number, part in enumerate(get_state_dict(model, optimizer, options=options)):
        add(part, str(number))
    return digest.hexdigest()


def saved(wrapper: str, optimizer: str, directory: str) -> tuple[str, str]:
    try:
        model, chosen = built(wrapper, optimizer, seed=0, steps=2)
    except NotBuilt as error:
        return NOT_BUILT, str(error)
    expected = reference(model, chosen)
    try:
        save_distributed(directory, model, chosen, step=2)
    except CheckpointError as error:
        return REFUSED, str(error)
    return EXACT, expected


def loaded(wrapper: str, optimizer: str, directory: str) -> tuple[str, str]:
    try:
        model, chosen = built(wrapper, optimizer, seed=1, steps=1)
    except NotBuilt as error:
        return NOT_BUILT, str(error)
    try:
        load_distributed(directory, model, chosen)
    except CheckpointError as error:
        return REFUSED, str(error)
    return EXACT, reference(model, chosen)


def outcome(call: Callable[..., Any], world_size: int, *args: str) -> tuple[str, str]:
    """The outcome on rank 0, whose reference is full."""
    try:
        found = run_on_ranks(call, *args, world_size=world_size, timeout=LIMIT_S)
    except Exception as error:
        return FAILED, f"{type(error).__name__}: {error}"
    if len({how for how, _ in found}) > 1:
        return FAILED, f"the ranks differ: {[how for how, _ in found]}"
    return found[0]


def tried(wrapper: str, optimizer: str) -> list[tuple[str, str, str]]:
    """How the save and each load ended: what, how, why."""
    what = f"{wrapper} / {optimizer}"
    with tempfile.TemporaryDirectory() as directory:
        how, expected = outcome(saved, 4, wrapper, optimizer, directory)
        if how != EXACT:
            return [(f"{what}: save", how, expected)]
        found = []
        for ranks in (4, 2, 3):
            how, said = outcome(loaded, ranks, wrapper, optimizer, directory)
            if how == EXACT and said != expected:
                how, said = FAILED, "loaded without a word, and differs"
            found.append((f"{what}: load on {ranks}", how, said if how != EXACT else ""))
        return found


def main() -> int:
    chosen = options(__doc__, only="")
    print(describe())
    start_s, outcomes = time.monotonic(), []
    for wrapper, optimizer in itertools.product(WRAPPERS, OPTIMIZERS):
        if chosen.only in f"{wrapper} / {optimizer}":
            outcomes += tried(wrapper, optimizer)
            if sys.stderr.isatty():
                print(f"\r{len(outcomes)}: {wrapper} / {optimizer:50}", end="", file=sys.stderr)
    counts = Counter(how for _, how, _ in outcomes)
    print(table(["saves and loads", *counts], [[len(outcomes), *counts.values()]]))
    reasons: dict[tuple[str, str], list[str]] = {}
    for what, how, said in outcomes:
        if how != EXACT:
            reasons.setdefault((how, said[:160]), []).append(what)
    for (how, said), where in reasons.items():
        print(f"{how}: {where[0]}{f' and {len(where) - 1} more' if len(where) > 1 else ''}: {said}")
    print(f"{time.monotonic() - start_s:.0f} s")
    return int(counts[FAILED] > 0)


if __name__ == "__main__":
    sys.exit(main())
