"""The blocks of models: of transformers' families and of models written by hand; sharding changes nothing."""

from typing import Any

import pytest
import torch
import transformers as tf
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from fsdp_utils import check_sharding, shard, transformer_block_classes
from tests.on_ranks import case, on_ranks
from tests.sharded import Block, HandWritten, assert_trains_alike, fsdp1, loss_of
from tests.tiny_transformers import HIDDEN, TINY, VOCABULARY, text


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
        (two_classes(50), {"Scale", "Other"}),  # a tenth of the parameters
        (two_classes(49), {"Scale"}),
    ],
    ids=["by hand", "of torch", "in a dict", "beside the list", "wrapped", "a tenth", "less"],
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


def test_they_are_found_where_the_model_names_none() -> None:
    model = TINY["t5"].make()
    for module in model.modules():
        if hasattr(module, "_no_split_modules"):
            module._no_split_modules = None
    assert names_of(model) == {"T5Block"}


def test_they_are_found_in_a_model_made_of_models_of_which_only_one_names_them() -> None:
    speech, text_model = TINY["wav2vec2"].make(), TINY["bart"].make()
    model = nn.ModuleDict({"encoder": speech, "decoder": text_model.get_decoder()})
    assert names_of(model) == {"Wav2Vec2EncoderLayer", "BartDecoderLayer"}


@pytest.mark.parametrize(
    ("name", "expected"),
    {
        "Blip2": {"Blip2EncoderLayer", "Blip2QFormerLayer", "OPTDecoderLayer"},
        "Idefics3": {"Idefics3EncoderLayer", "LlamaDecoderLayer"},
    }.items(),
)
def test_a_tower_that_the_model_does_not_name_is_found_beside_its_decoder(
    name: str, expected: set[str]
) -> None:
    """At the sizes of the default configurations: a few % of the parameters, half a block or more."""
    cls = getattr(tf, f"{name}Model")
    with torch.device("meta"):
        model = cls(cls.config_class())
    assert names_of(model) == expected


def test_a_single_layer_is_a_block_if_the_model_says_so() -> None:
    model = tf.LlamaModel(tf.LlamaConfig(**{**HIDDEN, "num_hidden_layers": 1}, vocab_size=VOCABULARY))
    assert names_of(model) == {"LlamaDecoderLayer"}


# ---- sharded by them ----


@on_ranks(timeout=110)
def test_each_family_is_sharded_by_its_blocks_and_has_the_loss_and_gradients_of_the_unsharded() -> None:
    for family, tiny in TINY.items():
        with case(family):
            assert names_of(tiny.make()) == tiny.blocks
            assert_trains_alike(tiny.make, tiny.batch, tiny.number + 1)


@on_ranks()
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


@on_ranks()
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
