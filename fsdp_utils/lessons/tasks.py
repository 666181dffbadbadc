"""A small training task: dates for a Llama.

It is seeded, needs no download, and keeps test samples that training never sees.
"""

import datetime
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

SEED = 0
BATCH = 24  # divides evenly among 2, 3, 4, 6, 8, 12 and 24 ranks
IGNORED = -100  # a label that the loss of transformers' models leaves out

DATES, DATES_FOR_TEST = 800, 100
FIRST_DAY, LAST_DAY = datetime.date(1950, 1, 1), datetime.date(2049, 12, 31)
MONTHS = (
    "january february march april may june july august september october november december".split()  # noqa: SIM905
)
LONGEST_SPELLING = len("september 30, 2000")

PAD, END = 0, 1
CHARACTERS = "abcdefghijklmnopqrstuvwxyz0123456789 ,->"
ID_OF = {character: index for index, character in enumerate(CHARACTERS, start=END + 1)}
VOCABULARY = 64  # the characters, rounded up
TOKENS: Any = {"vocab_size": VOCABULARY, "pad_token_id": PAD, "eos_token_id": END}


@dataclass(frozen=True)
class Task:
    """A model and the data it learns from."""

    build: Callable[[], PreTrainedModel]  # with the same weights on every rank
    train: dict[str, Tensor]  # what the model's forward takes, by name, one sample per row
    test: dict[str, Tensor]
    predicts_next: bool = False  # whether the logits at a position are about the label after it (decoders)

    def batch(self, step: int, *, size: int = BATCH) -> dict[str, Tensor]:
        """Return the samples of a step, from 0 on. Each epoch goes through all samples in a new order."""
        count = len(next(iter(self.train.values())))
        epoch, index = divmod(step, count // size)
        order = torch.randperm(count, generator=torch.Generator().manual_seed(SEED + epoch))
        rows = order[index * size : (index + 1) * size]
        return {name: tensor[rows] for name, tensor in self.train.items()}


def dates_llama() -> Task:
    """Make a task of dates for a decoder: "7 march 1998>" is continued with "1998-03-07".

    Its labels, i64[n, length] as the input_ids, leave the question out.
    """

    def encode(pairs: list[tuple[str, str]]) -> dict[str, Tensor]:
        # spaces in front make all questions equally long, so that the answers stand in the same columns
        questions = _characters([f"{source:>{LONGEST_SPELLING}}>" for source, _ in pairs])
        answers = torch.nn.functional.pad(_characters([answer for _, answer in pairs]), (0, 1), value=END)
        labels = torch.cat([torch.full_like(questions, IGNORED), answers], dim=1)
        return {"input_ids": torch.cat([questions, answers], dim=1), "labels": labels}

    sizes: Any = {
        "hidden_size": 64,
        "intermediate_size": 192,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
    }
    config = transformers.LlamaConfig(**sizes, **TOKENS, max_position_embeddings=64, bos_token_id=None)
    train, test = date_pairs()

    def build() -> PreTrainedModel:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(SEED)
            return transformers.LlamaForCausalLM(config)

    return Task(build, encode(train), encode(test), predicts_next=True)


def date_pairs() -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """Return dates as people write them, with their ISO form: for training, and for the test.

    All spellings of one date are on one side, so the test asks for no date that training has answered.
    """
    chosen = random.Random(SEED)
    days = chosen.sample(range((LAST_DAY - FIRST_DAY).days + 1), DATES)
    dates = [FIRST_DAY + datetime.timedelta(days=day) for day in days]
    test, train = dates[:DATES_FOR_TEST], dates[DATES_FOR_TEST:]
    return list(_spelled(train)), list(_spelled(test))


def _spelled(dates: Iterable[datetime.date]) -> Iterable[tuple[str, str]]:
    for date in dates:
        month = MONTHS[date.month - 1]
        yield f"{date.day} {month} {date.year}", date.isoformat()
        yield f"{month} {date.day}, {date.year}", date.isoformat()
        yield f"{date.day}-{month[:3]}-{date.year}", date.isoformat()


def _characters(texts: list[str]) -> Tensor:
    """Return one token per character, of texts that are equally long: i64[n, length]."""
    return torch.tensor([[ID_OF[character] for character in text] for text in texts])
