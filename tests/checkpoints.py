"""What the tests of checkpoints share: one tiny model with all that is hard to save, and how a call ended."""

import hashlib
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from fsdp_utils import CheckpointError, run_on_ranks

WORDS, WIDTH, BATCH = 11, 6, 12


class Block(nn.Module):
    scale: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 7)  # 7 rows do not divide among 2 or 3 ranks
        self.norm = nn.LayerNorm(7)
        self.down = nn.Linear(7, width)
        self.register_buffer("scale", torch.rand(3))
        self.register_buffer("cache", torch.arange(2.0), persistent=False)

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


Wrap = Callable[[Any], Any]


def fsdp1(model: nn.Module, **options: Any) -> FSDP1:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return FSDP1(model, device_id=torch.device("cpu"), **options)


def by_blocks(model: nn.Module, **options: Any) -> FSDP1:
    return fsdp1(model, auto_wrap_policy=ModuleWrapPolicy({Block}), **options)


def fsdp2(model: Any, **options: Any) -> Any:
    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)


WRAPPERS: dict[str, Wrap] = {
    "none": lambda model: model,
    "fsdp2": fsdp2,
    "fsdp1": by_blocks,
    "fsdp1 with use_orig_params": lambda model: by_blocks(model, use_orig_params=True),
    "ddp": DistributedDataParallel,
}
KINDS = tuple(kind for kind in WRAPPERS if kind != "none")


def build(kind: str | Wrap, *, seed: int = 0, width: int = WIDTH) -> tuple[Any, torch.optim.AdamW]:
    """Build the model in a wrapper and its optimizer with two groups, of its blocks and of the rest.

    The wrapper is one of WRAPPERS, or a function that wraps the model.
    """
    torch.manual_seed(seed)
    model = (WRAPPERS[kind] if isinstance(kind, str) else kind)(Net(width))
    blocks = [param for name, param in model.named_parameters() if "blocks" in name]
    others = [param for name, param in model.named_parameters() if "blocks" not in name]
    return model, torch.optim.AdamW([{"params": blocks}, {"params": others, "lr": 3e-2}], lr=1e-2)


class Data:
    """An endless, shuffled stream of words, cut among the ranks; its place is a generator's state."""

    def __init__(self, place: Tensor | None = None) -> None:
        self.generator = torch.Generator().manual_seed(7)
        if place is not None:
            self.generator.set_state(place)

    def next(self) -> Tensor:
        """This rank's part of the next batch. i64[BATCH / ranks]"""
        batch = torch.randint(0, WORDS, (BATCH,), generator=self.generator)
        return batch.chunk(world_size())[rank()]


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def train(
    model: nn.Module, optimizer: Optimizer | Iterable[Optimizer], data: Data, steps: int
) -> list[float]:
    """The loss of each step, averaged over the ranks."""
    optimizers = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
    losses = []
    for _ in range(steps):
        words = data.next()
        loss = nn.functional.cross_entropy(model(words), (words + 1) % WORDS)
        loss.backward()
        for one in optimizers:
            one.step()
            one.zero_grad()
        mean = loss.detach().clone()
        if dist.is_initialized():
            dist.all_reduce(mean)
        losses.append(mean.item() / world_size())
    return losses


def whole(tensor: Tensor) -> Tensor:
    """A copy of all of a tensor, also of one that is sharded. A collective."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def wholes(model: nn.Module, optimizer: Optimizer | None = None) -> dict[str, Tensor]:
    """All parameters, buffers and the optimizer's tensors, by name. A collective; not for FSDP1."""
    found = {name: whole(tensor) for name, tensor in model.state_dict().items() if isinstance(tensor, Tensor)}
    for name, param in model.named_parameters():
        entries = optimizer.state.get(param, {}) if optimizer is not None else {}
        found |= {f"{name}.{key}": whole(value) for key, value in entries.items() if torch.is_tensor(value)}
    return found


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


def stored(directory: Path) -> set[str]:
    """The names of the tensors in all safetensors files of a directory."""
    names = set()
    for path in directory.rglob("*.safetensors"):
        with safe_open(path, "pt") as file:
            names.update(file.keys())
    return names


class Outcome(NamedTuple):
    """How a call ended on one rank."""

    error: str | None
    seconds: float
    kind: str = ""  # the error's class


def outcome(call: Callable[[], object]) -> Outcome:
    start, error, kind = time.monotonic(), None, ""
    try:
        call()
    except CheckpointError as caught:
        error, kind = str(caught), type(caught).__name__
    return Outcome(error, time.monotonic() - start, kind)


def played(
    scenes: Sequence[Callable[[Path], Any]], folder: Path, world_size: int = 2
) -> dict[str, list[Any]]:
    """Play scenes one after the other on ranks that are started once: what each returned, by rank."""
    by_rank = run_on_ranks(lambda: [scene(folder) for scene in scenes], world_size=world_size, timeout=110)
    return {
        scene.__name__: list(found) for scene, found in zip(scenes, zip(*by_rank, strict=True), strict=True)
    }


def refusals(calls: Mapping[str, Callable[[], object]]) -> dict[str, str | None]:
    """What each call was refused with; None for one that was not."""
    return {name: outcome(call).error for name, call in calls.items()}


def assert_told(
    by_rank: Sequence[Mapping[str, str | None]], expected: Mapping[str, str | Sequence[str]]
) -> None:
    """Every rank was told the same, and in each case what is expected."""
    assert all(found == by_rank[0] for found in by_rank)
    assert by_rank[0].keys() == expected.keys()
    for name, words in expected.items():
        for part in [words] if isinstance(words, str) else words:
            assert part in str(by_rank[0][name]), f"{name}: {by_rank[0][name]}"
