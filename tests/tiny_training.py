"""What the tests of the training program train: a small decoder, a rule to learn, and faults to meet."""

import os
import sys
import time
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.sharded import Block

VOCABULARY, LENGTH = 16, 6
POISON = VOCABULARY - 1  # a token that no good sample has: the loss of one that has it is NaN


class Output(NamedTuple):
    loss: Tensor


class Decoder(nn.Module):
    """Takes and gives what the models of transformers do."""

    has_bias = True

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(8, VOCABULARY, bias=self.has_bias)

    def logits(self, input_ids: Tensor) -> Tensor:
        sys.audit("tests.forward")
        if self.training != torch.is_grad_enabled():
            raise RuntimeError("dropout is for training, where there are gradients, and not for evaluation")
        x = self.embedding(input_ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)[:, :-1].flatten(0, 1)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Output:
        loss = F.cross_entropy(self.logits(input_ids), labels[:, 1:].flatten())
        return Output(loss * float("nan") if (input_ids == POISON).any() else loss)


@dataclass
class Counting:
    """Numbers that count upwards, with labels left out at random: ranks have unequal shares of the loss."""

    train: dict[str, Tensor]
    test: dict[str, Tensor]
    kind: type[Decoder]
    predicts_next: bool = True

    def build(self) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return self.kind()


def counting(kind: type[Decoder] = Decoder) -> Counting:
    numbers = torch.arange(31)[:, None] + torch.arange(LENGTH)
    tokens = numbers % (VOCABULARY - 1)
    left_out = torch.rand(tokens.shape, generator=torch.Generator().manual_seed(0)) < 0.3
    left_out[:, -1] = False
    data = {"input_ids": tokens, "labels": tokens.masked_fill(left_out, -100)}
    train, test = ({name: tensor[rows].clone() for name, tensor in data.items()} for rows in SPLIT)
    return Counting(train, test, kind)


SPLIT = slice(24), slice(24, None)


# ---- other data ------------------------------------------------------------------------------------


def poisoned(kind: type[Decoder] = Decoder) -> Counting:
    """One bad sample: number 5."""
    task = counting(kind)
    task.train["input_ids"][5, 2] = POISON
    return task


def gaps(kind: type[Decoder] = Decoder) -> Counting:
    """Every other training sample has no label at all, nor has any sample of the test."""
    task = counting(kind)
    task.train["labels"][::2] = -100
    task.test["labels"][:] = -100
    return task


def unlabelled() -> Counting:
    """No sample has a label."""
    task = gaps()
    task.train["labels"][:] = -100
    return task


def no_labels() -> SimpleNamespace:
    """No data to train on."""
    return SimpleNamespace(train={"x": torch.ones(8, 2)}, test={})


def without_model() -> SimpleNamespace:
    """The data alone, in a dataset; model.config says which model."""
    tokens = torch.arange(64).view(8, 8) % VOCABULARY
    rows = [{"input_ids": row, "labels": row} for row in tokens]
    return SimpleNamespace(train=rows, test=rows[:3], predicts_next=True)


def single_tokens() -> SimpleNamespace:
    """A decoder has nothing to predict."""
    tokens = torch.ones(8, 1, dtype=torch.int64)
    return SimpleNamespace(train={"input_ids": tokens, "labels": tokens}, test={}, predicts_next=True)


# ---- other models ----------------------------------------------------------------------------------


class WithoutBias(Decoder):
    """Lacks a parameter."""

    has_bias = False


class Divided(Decoder):
    """Divides by the number of labels itself: without one the gradient is NaN, too."""

    def forward(self, input_ids: Tensor, labels: Tensor) -> Output:
        wanted = labels[:, 1:].flatten()
        loss = F.cross_entropy(self.logits(input_ids), wanted, reduction="sum")
        return Output(loss / (wanted != -100).sum())


class Detached(Decoder):
    """Where the loss is NaN the gradient is not."""

    def forward(self, input_ids: Tensor, labels: Tensor) -> Output:
        loss = super().forward(input_ids.clamp(max=POISON - 1), labels).loss
        return Output(loss + float("nan") if (input_ids == POISON).any() else loss)


class Slow(Decoder):
    """Takes a tenth of a second, in which there is time for a fault, and none of a processor's."""

    def forward(self, input_ids: Tensor, labels: Tensor) -> Output:
        time.sleep(0.1)
        return super().forward(input_ids, labels)


class Pairs(Decoder):
    """Is trained on two samples at once: the largest equal parts of a batch of 8 that are at most 3."""

    def forward(self, input_ids: Tensor, labels: Tensor) -> Output:
        assert len(input_ids) == 2 or not self.training
        return super().forward(input_ids, labels)


class Drawing(Decoder):
    """Notes a random number in each forward, as dropout would use it."""

    drawn: ClassVar[list[float]] = []

    def forward(self, input_ids: Tensor, labels: Tensor) -> Output:
        if self.training:
            self.drawn.append(torch.rand(()).item())
        return super().forward(input_ids, labels)


another_model = partial(counting, WithoutBias)
gaps_divided = partial(gaps, Divided)
poisoned_loss = partial(poisoned, Detached)
slow = partial(counting, Slow)
pairs = partial(counting, Pairs)
drawing = partial(counting, Drawing)


def forking() -> Counting:
    """The data of `slow`, in a process with a child that outlives it, as a worker that reads data may."""
    if os.fork() == 0:
        os.setsid()
        for stream in (0, 1, 2):
            os.close(stream)
        time.sleep(30)
        os._exit(0)
    return slow()
