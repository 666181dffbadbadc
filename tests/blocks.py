"""A residual block, of which the tests make small models."""

import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, width: int, inner: int | None = None) -> None:
        super().__init__()
        inner = inner or 4 * width
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # f32[..., width]
        return x + self.down(self.up(x).relu())
