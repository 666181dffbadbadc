"""The training scripts of this folder share a process group, a small decoder and its samples.

As they are, nothing is to be found in them. A comment `# fault NAME: CODE` gives the line that stands in
place of the next line of code in the script with that fault.
"""

import os
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

CPU = torch.device("cpu")
VOCABULARY, LENGTH, WIDTH = 128, 16, 128
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


class Block(nn.Module):
    """Attention and a feed-forward, with the norms in front, as in GPT-2; checkpointed with these options."""

    def __init__(self, width: int = WIDTH, dropout: float = 0.0, **checkpointed: bool) -> None:
        super().__init__()
        self.heads, self.checkpointed = 4, checkpointed
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.compute, x, **self.checkpointed) if self.checkpointed else self.compute(x)

    def compute(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.dropout(self.out(mixed.transpose(1, 2).reshape(batch, length, width)))
        return x + self.dropout(self.down(F.gelu(self.up(self.norm2(x)))))


class Decoder(nn.Module):
    """Predict the next token."""

    def __init__(self, blocks: int = 2, width: int = WIDTH, **of_block: Any) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        nn.init.normal_(self.embedding.weight, std=0.02)
        self.blocks = nn.ModuleList(Block(width, **of_block) for _ in range(blocks))
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


def next_token_loss(logits: Tensor, tokens: Tensor, reduction: str = "mean") -> Tensor:
    """Compare the logits with the tokens that follow; a negative token is not counted."""
    predicted, labels = logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten()
    return F.cross_entropy(predicted, labels, ignore_index=IGNORED, reduction=reduction)


def say(step: int, loss: Tensor) -> None:
    """Print the loss of this rank's samples, on rank 0."""
    if dist.get_rank() == 0:
        print(f"step {step}: loss {loss.item():.4f}", flush=True)


def sharded(model: Any, blocks: Iterable[Any], **options: Any) -> Any:
    """Make each block a unit of FSDP2, and what is left of the model the root."""
    mesh = cpu_mesh()
    for block in blocks:
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)
