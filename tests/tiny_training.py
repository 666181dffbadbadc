"""What the tests of the training program train: a small decoder, a rule to learn, and faults to meet."""

import ctypes
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
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

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(8, VOCABULARY, bias=width == 8)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Output:
        sys.audit("tests.forward")
        if self.training != torch.is_grad_enabled():
            raise RuntimeError("dropout is for training, where there are gradients, and not for evaluation")
        x = self.embedding(input_ids)
        for block in self.blocks:
            x = block(x)
        logits = self.head(x)
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        if (input_ids == POISON).any():
            loss = loss * float("nan")
        return Output(loss)


def build(kind: type[Decoder] = Decoder) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return kind()


@dataclass
class Counting:
    """Numbers that count upwards, with labels left out at random: ranks have unequal shares of the loss."""

    train: dict[str, Tensor]
    test: dict[str, Tensor]
    predicts_next: bool = True

    def build(self) -> nn.Module:
        return build()


def counting() -> Counting:
    numbers = torch.arange(31)[:, None] + torch.arange(LENGTH)
    tokens = numbers % (VOCABULARY - 1)
    left_out = torch.rand(tokens.shape, generator=torch.Generator().manual_seed(0)) < 0.3
    left_out[:, -1] = False
    data = {"input_ids": tokens, "labels": tokens.masked_fill(left_out, -100)}
    return Counting(
        {name: tensor[:24] for name, tensor in data.items()},
        {name: tensor[24:] for name, tensor in data.items()},
    )


def poisoned() -> Counting:
    """One bad sample: number 5."""
    task = counting()
    task.train["input_ids"] = task.train["input_ids"].clone()
    task.train["input_ids"][5, 2] = POISON
    return task


def wider() -> Counting:
    """The same data, for a model that lacks a parameter."""
    task = counting()
    task.build = lambda: Decoder(width=16)  # type: ignore[method-assign]
    return task


def gaps() -> Counting:
    """Every other training sample has no label at all, nor has any sample of the test."""
    task = counting()
    task.train["labels"] = task.train["labels"].clone()
    task.train["labels"][::2] = -100
    task.test["labels"] = torch.full_like(task.test["labels"], -100)
    return task


def unlabelled() -> Counting:
    """No sample has a label."""
    task = gaps()
    task.train["labels"] = torch.full_like(task.train["labels"], -100)
    return task


def bad_test() -> Counting:
    """The test cannot be evaluated: it has a token that the model does not know."""
    task = counting()
    task.test["input_ids"] = task.test["input_ids"] + VOCABULARY
    return task


class Divided(Decoder):
    """Divides by the number of labels itself: without one the gradient is NaN, too."""

    def forward(self, input_ids: Tensor, labels: Tensor) -> Output:
        x = self.embedding(input_ids)
        for block in self.blocks:
            x = block(x)
        logits, wanted = self.head(x)[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
        return Output(F.cross_entropy(logits, wanted, reduction="sum") / (wanted != -100).sum())


def gaps_divided() -> Counting:
    """The data of `gaps` for such a model."""
    task = gaps()
    task.build = lambda: build(Divided)  # type: ignore[method-assign]
    return task


class Detached(Decoder):
    """Where the loss is NaN the gradient is not."""

    def forward(self, input_ids: Tensor, labels: Tensor) -> Output:
        loss = super().forward(input_ids.clamp(max=POISON - 1), labels).loss
        return Output(loss + float("nan") if (input_ids == POISON).any() else loss)


def poisoned_loss() -> Counting:
    """The bad sample of `poisoned` for such a model."""
    task = poisoned()
    task.build = lambda: build(Detached)  # type: ignore[method-assign]
    return task


class Slow(Decoder):
    """Takes a tenth of a second, in which there is time for a fault, and none of a processor's."""

    def forward(self, input_ids: Tensor, labels: Tensor) -> Output:
        time.sleep(0.1)
        return super().forward(input_ids, labels)


def slow() -> Counting:
    """The same data, for a model that takes its time."""
    task = counting()
    task.build = lambda: build(Slow)  # type: ignore[method-assign]
    return task


class Stuck(Decoder):
    """From its fifth step on it waits in C without end, the GIL released, as for an NCCL kernel."""

    steps = 0

    def forward(self, input_ids: Tensor, labels: Tensor) -> Output:
        self.steps += self.training
        if self.steps == 5:
            lock = ctypes.create_string_buffer(128)  # a pthread_mutex_t: zeros are a fresh one
            for _ in range(2):
                ctypes.CDLL(None).pthread_mutex_lock(lock)
        return super().forward(input_ids, labels)


def stuck() -> Counting:
    """The same data, for a model that gets stuck, and a second that takes a twentieth of one."""
    _quicken_clock(20)
    task = counting()
    task.build = lambda: build(Stuck)  # type: ignore[method-assign]
    return task


class LongSteps(Decoder):
    """Steps longer than what is waited; the longest was before, so that a busy machine has room."""

    steps = 0

    def forward(self, input_ids: Tensor, labels: Tensor) -> Output:
        if self.training:
            self.steps += 1
            time.sleep(3.0 if self.steps == 2 else 0.8)
        return super().forward(input_ids, labels)


def long_steps() -> Counting:
    """The same data, for such a model; 0.8 s are 32 s by the program's clock."""
    _quicken_clock(40)
    task = counting()
    task.build = lambda: build(LongSteps)  # type: ignore[method-assign]
    return task


def _quicken_clock(times: float) -> None:
    def quick(now: Callable[[], float]) -> Callable[[], float]:
        begun = now()
        return lambda: begun + times * (now() - begun)

    time.monotonic, time.perf_counter = quick(time.monotonic), quick(time.perf_counter)


class Pairs(Decoder):
    """Is trained on two samples at once: the largest equal parts of a batch of 8 that are at most 3."""

    def forward(self, input_ids: Tensor, labels: Tensor) -> Output:
        assert len(input_ids) == 2 or not self.training
        return super().forward(input_ids, labels)


def pairs() -> Counting:
    """The same data, for such a model."""
    task = counting()
    task.build = lambda: build(Pairs)  # type: ignore[method-assign]
    return task


class Drawing(Decoder):
    """Notes a random number in each forward, as dropout would use it."""

    drawn: ClassVar[list[float]] = []

    def forward(self, input_ids: Tensor, labels: Tensor) -> Output:
        if self.training:
            self.drawn.append(torch.rand(()).item())
        return super().forward(input_ids, labels)


def drawing() -> Counting:
    """The same data, for such a model."""
    task = counting()
    task.build = lambda: build(Drawing)  # type: ignore[method-assign]
    return task


def forking() -> Counting:
    """The data of `slow`, in a process with a child that outlives it, as a worker that reads data may."""
    if os.fork() == 0:
        os.setsid()
        for stream in (0, 1, 2):
            os.close(stream)
        time.sleep(30)
        os._exit(0)
    return slow()


def no_labels() -> SimpleNamespace:
    """No data to train on."""
    return SimpleNamespace(train={"x": torch.ones(8, 2)}, test={})


def uneven() -> SimpleNamespace:
    """A label is missing."""
    return SimpleNamespace(train={"x": torch.ones(8, 2), "labels": torch.ones(7)}, test={})
