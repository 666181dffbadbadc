"""The blocks of transformers models of many families, and that sharding by them changes no result."""

from typing import NamedTuple

import pytest
import torch
import transformers as tf
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from fsdp_utils import check_sharding, run_on_ranks, shard, transformer_block_classes
from tests.sharded import (
    Outcome,
    OutcomeFSDP1,
    assert_same,
    assert_same_fsdp1,
    compare,
    compare_fsdp1,
    fsdp1,
)
from tests.tiny_transformers import HIDDEN, TINY, VOCABULARY, text


@pytest.mark.parametrize("family", TINY)
def test_the_blocks_of_a_transformers_model_are_found(family: str) -> None:
    tiny = TINY[family]
    model = tiny.make()
    classes = transformer_block_classes(model)
    assert {cls.__name__ for cls in classes} == tiny.blocks
    assert sum(isinstance(module, tuple(classes)) for module in model.modules()) == tiny.number


def test_they_are_found_where_the_model_names_none() -> None:
    model = TINY["t5"].make()
    for module in model.modules():
        if hasattr(module, "_no_split_modules"):
            module._no_split_modules = None
    assert {cls.__name__ for cls in transformer_block_classes(model)} == {"T5Block"}


def test_they_are_found_in_a_model_made_of_models_of_which_only_one_names_them() -> None:
    speech, text_model = TINY["wav2vec2"].make(), TINY["bart"].make()
    model = nn.ModuleDict({"encoder": speech, "decoder": text_model.get_decoder()})
    names = {cls.__name__ for cls in transformer_block_classes(model)}
    assert names == {"Wav2Vec2EncoderLayer", "BartDecoderLayer"}


@pytest.mark.parametrize(
    ("name", "expected"),
    {
        "Blip2": {"Blip2EncoderLayer", "Blip2QFormerLayer", "OPTDecoderLayer"},
        "GraniteSpeech": {"GraniteSpeechConformerBlock", "Blip2QFormerLayer", "GraniteDecoderLayer"},
        "VibeVoiceAsr": {"VibeVoiceAcousticTokenizerEncoderLayer", "Qwen2DecoderLayer"},
        "Idefics3": {"Idefics3EncoderLayer", "LlamaDecoderLayer"},
    }.items(),
)
def test_a_tower_that_the_model_does_not_name_is_found_beside_its_decoder(
    name: str, expected: set[str]
) -> None:
    """At the sizes of the default configurations: 2 to 9 % of the parameters, half a block or more."""
    cls = getattr(tf, f"{name}Model")
    with torch.device("meta"):
        model = cls(cls.config_class())
    assert {block.__name__ for block in transformer_block_classes(model)} == expected


def test_a_single_layer_is_a_block_if_the_model_says_so() -> None:
    model = tf.LlamaModel(tf.LlamaConfig(**{**HIDDEN, "num_hidden_layers": 1}, vocab_size=VOCABULARY))
    assert {cls.__name__ for cls in transformer_block_classes(model)} == {"LlamaDecoderLayer"}


def tied_in_two_units_of_fsdp2() -> list[str]:
    model = TINY["qwen3, tied"].make()
    fully_shard(model.lm_head)
    problems = check_sharding(shard(model))
    with pytest.raises(ValueError, match="shared"):  # what the message says of torch
        model(**text())
    return problems


def tied_in_two_units_of_fsdp1() -> list[str]:
    model = TINY["qwen3, tied"].make()
    blocks = transformer_block_classes(model)
    return check_sharding(fsdp1(model, auto_wrap_policy=ModuleWrapPolicy({nn.Embedding, *blocks})))


class OfARank(NamedTuple):
    """All that is asked of ranks here: to start them is to import transformers anew."""

    sharded: dict[str, Outcome]
    fsdp1: dict[str, list[OutcomeFSDP1]]
    tied_fsdp1: list[str]
    tied_fsdp2: list[str]


def on_a_rank() -> OfARank:
    return OfARank(
        {family: compare(tiny.make, tiny.batch) for family, tiny in TINY.items()},
        {family: compare_fsdp1(TINY[family]) for family in ("llama", "t5")},
        tied_in_two_units_of_fsdp1(),
        tied_in_two_units_of_fsdp2(),
    )


@pytest.fixture(scope="module")
def by_rank() -> list[OfARank]:
    return run_on_ranks(on_a_rank, timeout=110)


@pytest.mark.parametrize("family", TINY)
def test_a_sharded_transformers_model_has_the_loss_and_gradients_of_the_unsharded_one(
    by_rank: list[OfARank], family: str
) -> None:
    for rank in by_rank:
        assert_same(rank.sharded[family], units=TINY[family].number + 1)


@pytest.mark.parametrize("family", ["llama", "t5"])
def test_the_policy_makes_each_block_a_unit_of_fsdp1(by_rank: list[OfARank], family: str) -> None:
    for rank in by_rank:
        assert_same_fsdp1(rank.fsdp1[family], TINY[family])


def test_tied_weights_are_in_two_units(by_rank: list[OfARank]) -> None:
    first, second = by_rank
    assert (first.tied_fsdp1, first.tied_fsdp2) == (second.tied_fsdp1, second.tied_fsdp2)
    (message,) = first.tied_fsdp2
    assert message.startswith(
        "lm_head.weight and model.embed_tokens.weight are tied but in two units, lm_head and (root),"
    )
    assert "fully_shard([a, b])" in message
    (message,) = first.tied_fsdp1
    assert message.startswith(
        "lm_head.weight and model.embed_tokens.weight are tied but in two units, "
        "(root) and model.embed_tokens,"
    )
