"""Small training tasks: digits for a ViT, dates for a T5 and for a Llama.

Each task is seeded, needs no download, and keeps test samples that training never sees. Give the name
of a checkpoint (`pretrained="google-t5/t5-small"`) to use real weights instead: that needs the network
once, and more memory and time than the lessons promise.
"""

import datetime
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor
from transformers import PreTrainedModel

from fsdp_utils._extras import need
from fsdp_utils.notebook.cluster import LESSON_BATCH

SEED = 0
BATCH = LESSON_BATCH  # 24 divides evenly among 2, 3, 4, 6, 8, 12 and 24 ranks
IGNORED = -100  # a label that the loss of transformers' models leaves out

DIGITS_FOR_TEST = 360
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


@dataclass(frozen=True)
class Task:
    """A model and the data it learns from.

    Attributes:
        build: Makes the model, with the same weights on every rank.
        train, test: What the model's forward takes, by name, one sample per row.
        predicts_next: Whether the logits at a position are about the label after it (decoders).
    """

    build: Callable[[], PreTrainedModel]
    train: dict[str, Tensor]
    test: dict[str, Tensor]
    predicts_next: bool = False

    def batch(
        self,
        step: int,
        *,
        size: int = BATCH,
        rank: int = 0,
        world_size: int = 1,
        device: torch.device | str = "cpu",
    ) -> dict[str, Tensor]:
        """This rank's share of a step's samples; the shares of all ranks together are the whole batch.

        Args:
            step: Counts from 0. Each epoch goes through the training samples in a new order.
            size: Samples in the whole batch.

        Returns:
            `size / world_size` rows of each tensor in `train`, on the device.

        Raises:
            ValueError: The ranks cannot have equal shares. Their mean loss would not be the batch's.
        """
        if size % world_size:
            raise ValueError(
                f"a batch of {size} samples has no equal shares for {world_size} ranks: use a multiple."
            )
        count = len(next(iter(self.train.values())))
        epoch, index = divmod(step, count // size)
        order = torch.randperm(count, generator=torch.Generator().manual_seed(SEED + epoch))
        rows = order[index * size : (index + 1) * size].chunk(world_size)[rank]
        return {name: tensor[rows].to(device) for name, tensor in self.train.items()}

    @torch.no_grad()
    def accuracy(self, model: torch.nn.Module, *, device: torch.device | str = "cpu") -> float:
        """Share of the test labels that the model finds. All ranks of a sharded model call it together.

        For text: of the characters of the answer, each asked for with the right ones before it.
        """
        model.eval()
        test = {name: tensor.to(device) for name, tensor in self.test.items()}
        predicted, labels = model(**test).logits.argmax(-1), test["labels"]
        model.train()
        if self.predicts_next:
            predicted, labels = predicted[:, :-1], labels[:, 1:]
        return (predicted == labels)[labels != IGNORED].float().mean().item()


def digits_vit(*, pretrained: str | None = None) -> Task:
    """Digit classification: scikit-learn's 1,797 images of 8 by 8 pixels, for a vision transformer.

    Args:
        pretrained: A ViT checkpoint, such as "google/vit-base-patch16-224-in21k": a name or a folder.

    Returns:
        The task, with pixel_values f32[n, channels, height, width] from -1 to 1 and labels i64[n].
    """
    load_digits = need("sklearn.datasets", "notebooks").load_digits

    config = (
        transformers.AutoConfig.for_model(
            "vit",
            image_size=8,
            patch_size=4,
            num_channels=1,
            hidden_size=64,
            intermediate_size=256,
            num_hidden_layers=3,
            num_attention_heads=4,
            initializer_range=0.1,  # the usual 0.02 suits a width of 768: at 64 it learns nothing at first
            num_labels=10,
        )
        if pretrained is None
        else transformers.AutoConfig.from_pretrained(pretrained, num_labels=10)
    )
    images, labels = (torch.from_numpy(array) for array in load_digits(return_X_y=True))
    pixels = images.float().view(-1, 1, 8, 8) / 8 - 1  # scikit-learn's go from 0 to 16
    if pretrained is not None:
        pixels = F.interpolate(pixels, size=config.image_size, mode="bilinear")
        pixels = pixels.expand(-1, config.num_channels, -1, -1).contiguous()
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(SEED))
    train, test = order[DIGITS_FOR_TEST:], order[:DIGITS_FOR_TEST]
    data = {"pixel_values": pixels, "labels": labels.long()}
    return Task(
        build=_builder(transformers.ViTForImageClassification, config, pretrained),
        train={name: tensor[train] for name, tensor in data.items()},
        test={name: tensor[test] for name, tensor in data.items()},
    )


def dates_t5(*, pretrained: str | None = None) -> Task:
    """Dates for an encoder-decoder: "7 march 1998" becomes "1998-03-07".

    Args:
        pretrained: A T5 checkpoint, such as "google-t5/t5-small": a name or a folder. Its tokenizer is
            used too, so that answers differ in length and the ranks' mean losses weigh them differently.

    Returns:
        The task, with input_ids and attention_mask i64[n, source] and labels i64[n, target].
    """
    small = {"d_model": 64, "d_kv": 16, "d_ff": 256, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0}
    config, tokenize = _text_model("t5", pretrained, **small, decoder_start_token_id=PAD)

    def encode(pairs: list[tuple[str, str]]) -> dict[str, Tensor]:
        sources = tokenize([source for source, _ in pairs])
        answers = tokenize([answer for _, answer in pairs])
        return {
            "input_ids": sources,
            "attention_mask": (sources != config.pad_token_id).long(),
            "labels": answers.masked_fill(answers == config.pad_token_id, IGNORED),
        }

    train, test = date_pairs()
    build = _builder(transformers.T5ForConditionalGeneration, config, pretrained)
    return Task(build, encode(train), encode(test))


def dates_llama(*, pretrained: str | None = None) -> Task:
    """Dates for a decoder: "7 march 1998>" is continued with "1998-03-07".

    Args:
        pretrained: A Llama checkpoint, such as "HuggingFaceTB/SmolLM2-135M": a name or a folder. Its
            tokenizer is used too.

    Returns:
        The task, with input_ids i64[n, length] and labels i64[n, length] that leave the question out.
    """
    small = {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 6, "num_attention_heads": 4}
    config, tokenize = _text_model(
        "llama", pretrained, **small, max_position_embeddings=64, bos_token_id=None
    )

    def encode(pairs: list[tuple[str, str]]) -> dict[str, Tensor]:
        # spaces in front make all questions equally long, so that the answers stand in the same columns
        questions = tokenize([f"{source:>{LONGEST_SPELLING}}>" for source, _ in pairs], end=False)
        answers = tokenize([answer for _, answer in pairs])
        ids = torch.cat([questions, answers], dim=1)
        labels = torch.cat([torch.full_like(questions, IGNORED), answers], dim=1)
        return {"input_ids": ids, "labels": labels}

    train, test = date_pairs()
    build = _builder(transformers.LlamaForCausalLM, config, pretrained)
    return Task(build, encode(train), encode(test), predicts_next=True)


def date_pairs() -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """Dates as people write them, with their ISO form: for training, and for the test.

    All spellings of one date are on one side: a date that the test asks for was never answered in
    training in another spelling.
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


def _characters(texts: list[str], *, end: bool = True) -> Tensor:
    """One token per character, padded to the longest text: i64[n, longest + 1 for the end]."""
    rows = [[ID_OF[character] for character in text] + [END] * end for text in texts]
    return torch.nn.utils.rnn.pad_sequence(
        [torch.tensor(row) for row in rows], batch_first=True, padding_value=PAD
    )


def _text_model(kind: str, pretrained: str | None, **small: Any) -> tuple[Any, Callable[..., Tensor]]:
    """The configuration of a small model of characters, or of a checkpoint, and what makes its tokens."""
    if pretrained is None:
        tokens = {"vocab_size": VOCABULARY, "pad_token_id": PAD, "eos_token_id": END}
        return transformers.AutoConfig.for_model(kind, **tokens, **small), _characters
    tokenizer = transformers.AutoTokenizer.from_pretrained(pretrained)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token

    def tokenize(texts: list[str], *, end: bool = True) -> Tensor:
        return tokenizer(texts, padding=True, add_special_tokens=end, return_tensors="pt")["input_ids"]

    return transformers.AutoConfig.from_pretrained(pretrained), tokenize


def _builder(
    model: Any, config: transformers.PretrainedConfig, pretrained: str | None
) -> Callable[[], PreTrainedModel]:
    def build() -> PreTrainedModel:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(SEED)
            if pretrained is None:
                return model(config)
            return model.from_pretrained(pretrained, config=config, ignore_mismatched_sizes=True)

    return build
