"""The training scripts of this folder share a process group, a small decoder, its samples and a loop."""

import os
import sys
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

CPU = torch.device("cpu")
VOCABULARY, LENGTH, WIDTH = 128, 16, 128
CHANNELS = 8  # sensors
IGNORED = -100  # a label that the loss leaves out
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def start(seconds: float = 60) -> tuple[int, int]:
    """Join the process group that torchrun describes; return the rank and the number of ranks."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=seconds))
    torch.manual_seed(0)  # every rank initialises the same weights
    return dist.get_rank(), dist.get_world_size()


def cpu_mesh(*shape: int) -> DeviceMesh:
    """Lay the ranks out: one row of all of them, or replicas x shards."""
    if shape:
        return init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    return init_device_mesh("cpu", (int(os.environ["WORLD_SIZE"]),))


def run(main: Callable[[bool], None]) -> None:
    """Call `main(faulty)` as the command line says, then leave the process group."""
    if sys.argv[1:] not in (["fault"], ["right"]):
        raise SystemExit(f"usage: torchrun --nproc-per-node 2 {sys.argv[0]} fault|right")
    main(sys.argv[1] == "fault")
    if dist.is_initialized():
        dist.destroy_process_group()


class Block(nn.Module):
    """Attention and a feed-forward, with the norms in front, as in GPT-2."""

    def __init__(self, width: int = WIDTH, dropout: float = 0.0, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.dropout(self.out(mixed.transpose(1, 2).reshape(batch, length, width)))
        return x + self.dropout(self.down(F.gelu(self.up(self.norm2(x)))))


class Decoder(nn.Module):
    """Predict the next token."""

    def __init__(self, blocks: int = 2, width: int = WIDTH, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        nn.init.normal_(self.embedding.weight, std=0.02)
        self.blocks = nn.ModuleList(Block(width, dropout) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def encode(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.norm(x)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.encode(tokens))


def counting(samples: int, length: int = LENGTH, seed: int = 0) -> Tensor:
    """Make sequences of tokens that count upwards in steps of 1 to 5."""
    generator = torch.Generator().manual_seed(seed)
    first = torch.randint(VOCABULARY, (samples, 1), generator=generator)
    step = torch.randint(1, 6, (samples, 1), generator=generator)
    return (first + step * torch.arange(length)) % VOCABULARY


def readings(rank: int) -> Tensor:
    """Waves of several sensors; a sensor of rank 1 fails for one sample of its second batch."""
    phase = torch.rand(32, 1, CHANNELS, generator=torch.Generator().manual_seed(rank))
    waves = torch.sin(torch.arange(16).view(1, 16, 1) / 3 + 6 * phase)
    if rank == 1:
        waves[6, 9, 3] = float("nan")
    return waves


def next_token_loss(logits: Tensor, tokens: Tensor, reduction: str = "mean") -> Tensor:
    """Compare the logits with the tokens that follow; a negative token is not counted."""
    predicted, labels = logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten()
    return F.cross_entropy(predicted, labels, ignore_index=IGNORED, reduction=reduction)


def say(step: int, loss: Tensor, *more: object) -> None:
    """Print the loss of this rank's samples, on rank 0."""
    if dist.get_rank() == 0:
        print(f"step {step}: loss {loss.item():.4f}", *more, flush=True)


def sharded(model: Any, blocks: Iterable[Any] | None = None, **options: Any) -> Any:
    """Make each block a unit of FSDP2, and what is left of the model the root."""
    mesh = cpu_mesh()
    for block in model.blocks if blocks is None else blocks:
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def with_fsdp1(model: nn.Module, *units: type[nn.Module], **options: Any) -> FullyShardedDataParallel:
    """Make each module of these classes, by default each block, a unit of FSDP1."""
    policy = ModuleWrapPolicy(units or {Block})
    return FullyShardedDataParallel(model, auto_wrap_policy=policy, device_id=CPU, **options)


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    batches: Iterable[Any] | None = None,
    *,
    loss_of: Callable[[Any], Tensor] | None = None,
    limit: float | None = None,
    after_step: Callable[[int, Tensor], None] | None = None,
) -> None:
    """Train with SGD on this rank's own samples, or with what is given instead; limit: of the total norm."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=1e-2)
    batches = counting(32, seed=dist.get_rank()).split(4) if batches is None else batches
    for step, batch in enumerate(batches):
        loss = loss_of(batch) if loss_of else next_token_loss(model(batch), batch)
        loss.backward()
        if limit and isinstance(model, FullyShardedDataParallel):
            model.clip_grad_norm_(limit)
        elif limit:
            torch.nn.utils.clip_grad_norm_(model.parameters(), limit)
        optimizer.step()
        optimizer.zero_grad()
        (after_step or say)(step, loss)


def train_in_micro_batches(
    model: nn.Module, count: int, backward: Callable[[int, Tensor], Tensor], limit: float | None = None
) -> None:
    """Train on batches of `count` parts; `backward(number, tokens)` returns what a part adds to the loss."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for step, batch in enumerate(counting(24 * count, seed=dist.get_rank()).split(4 * count)):
        total = torch.zeros(())
        for i, tokens in enumerate(batch.chunk(count)):
            total += backward(i, tokens).detach()
        if limit:
            torch.nn.utils.clip_grad_norm_(model.parameters(), limit)
        optimizer.step()
        optimizer.zero_grad()
        say(step, total)
