"""The blocks of models: of transformers' families and of models written by hand; sharding changes nothing."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as tf
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from fsdp_utils import check_sharding, shard, transformer_block_classes
from tests.on_ranks import Together, case
from tests.sharded import Block, HandWritten, assert_trains_alike, fsdp1, loss_of
from tests.tiny_transformers import HIDDEN, TINY, VOCABULARY, text

on_two = Together(2)


def names_of(model: nn.Module) -> set[str]:
    return {cls.__name__ for cls in transformer_block_classes(model)}


# ---- models written by hand ----


class Scale(nn.Module):
    """Holds its parameter itself."""

    def __init__(self, elements: int = 8) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(elements))


class Other(Scale):
    pass


class Routed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([Block(), Block()])


class Activation(nn.Module):
    pass


def beside_the_list() -> nn.Module:
    model = HandWritten()
    model.blocks = nn.ModuleList([Routed(), Routed()])
    model.last = Routed()
    return model


def wrapped_on_meta() -> Any:
    with torch.device("meta"):
        model = HandWritten()
    apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, Block))
    return torch.compile(model, backend="eager")


def two_classes(elements: int) -> nn.Module:
    large, small = [Scale(450), Scale(450)], [Other(elements), Other(elements)]
    return nn.ModuleDict({"large": nn.ModuleList(large), "small": nn.ModuleList(small)})


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (HandWritten(), {"Block"}),
        (
            nn.Transformer(16, 2, 2, 2, batch_first=True),
            {"TransformerEncoderLayer", "TransformerDecoderLayer"},
        ),
        (nn.ModuleDict({"layers": nn.ModuleDict({"0": Scale(), "1": Scale()})}), {"Scale"}),
        (beside_the_list(), {"Routed"}),  # the outermost
        (wrapped_on_meta(), {"Block"}),
        (two_classes(113), {"Scale", "Other"}),  # all of it is half a block
        (two_classes(112), {"Scale"}),
    ],
    ids=["by hand", "of torch", "in a dict", "beside the list", "wrapped", "half a block", "less"],
)
def test_the_outermost_repeated_classes_are_the_blocks(model: nn.Module, expected: set[str]) -> None:
    assert names_of(model) == expected


@pytest.mark.parametrize(
    "model",
    [
        nn.Linear(2, 2),
        nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)),
        nn.ModuleList([Block()]),
        nn.ModuleList([Activation(), Activation()]),
    ],
    ids=["a layer", "plain layers", "only one", "without parameters"],
)
def test_a_model_without_blocks_is_refused_with_what_to_do(model: nn.Module) -> None:
    with pytest.raises(
        ValueError, match=rf"{type(model).__name__}: found no transformer blocks.*fully_shard"
    ):
        transformer_block_classes(model)


# ---- transformers ----


def unnamed() -> nn.Module:
    model = TINY["t5"].make()
    for module in model.modules():
        if hasattr(module, "_no_split_modules"):
            module._no_split_modules = None
    return model


def of_which_one_names_them() -> nn.Module:
    speech, text_model = TINY["wav2vec2"].make(), TINY["bart"].make()
    return nn.ModuleDict({"encoder": speech, "decoder": text_model.get_decoder()})


def a_tower_beside_its_decoder() -> nn.Module:
    """At the default sizes the tower has a few % of the parameters, which is more than half a block."""
    with torch.device("meta"):
        return tf.Idefics3Model(tf.Idefics3Config())


def single_layer() -> nn.Module:
    return tf.LlamaModel(tf.LlamaConfig(**{**HIDDEN, "num_hidden_layers": 1}, vocab_size=VOCABULARY))


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (unnamed, {"T5Block"}),
        (of_which_one_names_them, {"Wav2Vec2EncoderLayer", "BartDecoderLayer"}),
        (a_tower_beside_its_decoder, {"Idefics3EncoderLayer", "LlamaDecoderLayer"}),
        (single_layer, {"LlamaDecoderLayer"}),  # a block, as the model says so
    ],
)
def test_they_are_found_in_models_of_transformers(make: Callable[[], nn.Module], expected: set[str]) -> None:
    assert names_of(make()) == expected


# ---- sharded by them ----


@on_two
def test_each_family_is_sharded_by_its_blocks_and_has_the_loss_and_gradients_of_the_unsharded() -> None:
    for family, tiny in TINY.items():
        with case(family):
            assert names_of(tiny.make()) == tiny.blocks
            assert_trains_alike(tiny.make, tiny.batch, tiny.number + 1)


@on_two
def test_the_policy_makes_each_block_a_unit_of_fsdp1() -> None:
    for family, use_orig_params in (("llama", False), ("t5", True)):
        tiny = TINY[family]
        model = tiny.make().eval()
        expected = loss_of(model(**tiny.batch())).item()
        policy = ModuleWrapPolicy(transformer_block_classes(model))
        model = fsdp1(model, auto_wrap_policy=policy, use_orig_params=use_orig_params)
        units = [type(unit.module).__name__ for unit in FullyShardedDataParallel.fsdp_modules(model)]
        assert len(units) == tiny.number + 1
        assert set(units[1:]) == tiny.blocks
        assert loss_of(model(**tiny.batch())).item() == pytest.approx(expected, rel=1e-5)
        assert check_sharding(model) == []


@on_two
def test_tied_weights_are_in_two_units() -> None:
    tied = "lm_head.weight and model.embed_tokens.weight are tied but in two units, {}: "
    model = TINY["qwen3, tied"].make()
    fully_shard(model.lm_head)
    (message,) = check_sharding(shard(model))
    assert message.startswith(tied.format("lm_head and (root)"))
    assert "fully_shard([a, b])" in message
    with pytest.raises(ValueError, match="shared"):  # what the message says of torch
        model(**text())
    model = TINY["qwen3, tied"].make()
    policy = ModuleWrapPolicy({nn.Embedding, *transformer_block_classes(model)})
    (message,) = check_sharding(fsdp1(model, auto_wrap_policy=policy))
    assert message.startswith(tied.format("(root) and model.embed_tokens"))
