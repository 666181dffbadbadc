"""Set up what the training scripts of this folder share: a process group, a small decoder and its samples."""

import os
import sys
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

CPU = torch.device("cpu")
VOCABULARY, LENGTH, WIDTH = 128, 16, 128
IGNORED = -100  # a label that the loss leaves out


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

    def __init__(self, blocks: int = 3, width: int = WIDTH, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        nn.init.normal_(self.embedding.weight, std=0.02)
        self.blocks = nn.ModuleList(Block(width, dropout) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def counting(samples: int, length: int = LENGTH, seed: int = 0) -> Tensor:
    """Make sequences of tokens that count upwards in steps of 1 to 5."""
    generator = torch.Generator().manual_seed(seed)
    first = torch.randint(VOCABULARY, (samples, 1), generator=generator)
    step = torch.randint(1, 6, (samples, 1), generator=generator)
    return (first + step * torch.arange(length)) % VOCABULARY


def next_token_loss(logits: Tensor, tokens: Tensor, reduction: str = "mean") -> Tensor:
    """Compare the logits with the tokens that follow; a negative token is not counted."""
    predicted, labels = logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten()
    return F.cross_entropy(predicted, labels, ignore_index=IGNORED, reduction=reduction)


def say(step: int, loss: Tensor, *more: object) -> None:
    """Print the loss of this rank's samples, on rank 0."""
    if dist.get_rank() == 0:
        print(f"step {step}: loss {loss.item():.4f}", *more, flush=True)
