"""shard: which modules become units, that a sharded model trains as one process does, what is refused."""

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.torch_version import TorchVersion

from fsdp_utils import check_sharding, shard
from tests.on_ranks import Together, case
from tests.sharded import Block, HandWritten, assert_trains_alike, fsdp1, hand_written_batch, whole

on_two, on_four = Together(2), Together(4)


def hybrid_mesh(*shape: int) -> Any:
    return init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))


# ---- equal to the unsharded model ----


def partly_frozen() -> nn.Module:
    model = HandWritten()
    for block in model.blocks[:2]:
        block.mlp[0].requires_grad_(False)  # a unit with both kinds
    return model


def checkpoint_wrapped() -> nn.Module:
    model = HandWritten()
    apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, Block))
    return model


def sharing() -> nn.Module:
    """Blocks 0 and 2 share a parameter, and 1, 4 and the root: units are 3 and the root."""
    model = HandWritten()
    model.blocks.extend([Block(), Block()])
    model.blocks[0].mlp[0].weight = model.blocks[2].mlp[0].weight
    model.blocks[1].mlp[0].weight = model.blocks[4].mlp[0].weight
    model.blocks[4].mlp[2].bias = model.head[0].bias
    return model


def of_torch() -> nn.Module:
    layers = {"num_encoder_layers": 2, "num_decoder_layers": 2, "dim_feedforward": 32}
    return nn.Transformer(16, 2, batch_first=True, **layers)


def batch_of_torch() -> dict[str, Any]:
    x = torch.linspace(-1, 1, 2 * 4 * 16).reshape(2, 4, 16)
    return {"src": x, "tgt": x.flip(0)}


# by what is particular: the model, its batch, and shard's options
MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], dict[str, Any]], dict[str, Any]]] = {
    "hand-written": (HandWritten, hand_written_batch, {}),
    "tied": (partial(HandWritten, tied=True), hand_written_batch, {}),
    "tied, grad_op": (partial(HandWritten, tied=True), hand_written_batch, {"strategy": "grad_op"}),
    "of torch": (of_torch, batch_of_torch, {}),
    "partly frozen": (partly_frozen, hand_written_batch, {}),
    "checkpoint wrappers": (checkpoint_wrapped, hand_written_batch, {}),
    "sharing": (
        sharing,
        hand_written_batch,
        {"problems": 1, "units": 2},
    ),  # the root's has four of five blocks
}


@on_two
def test_has_the_loss_and_gradients_of_the_unsharded_one() -> None:
    for name, (make, batch, options) in MODELS.items():
        with case(name):
            assert_trains_alike(make, batch, **{"units": 5 if name == "of torch" else 4, **options})


@on_two
def test_which_modules_share_a_unit() -> None:
    def units(model: nn.Module) -> list[list[str]]:
        by_state: dict[Any, list[str]] = {}
        for name, module in model.named_modules():
            if isinstance(module, FSDPModule):
                by_state.setdefault(module._get_fsdp_state(), []).append(f"{type(module).__name__} {name}")
        return sorted(by_state.values())

    assert units(shard(sharing())) == [["FSDPBlock blocks.3"], ["FSDPHandWritten "]]
    blocks = ([f"FSDPCheckpointWrapper blocks.{i}"] for i in range(3))
    assert units(shard(checkpoint_wrapped())) == [*blocks, ["FSDPHandWritten "]]


@on_two
def test_the_strategy_decides_what_stays_gathered_after_forward() -> None:
    for strategy, is_freed in (("full", True), ("grad_op", False)):
        model = shard(HandWritten(), strategy=strategy)
        model(**hand_written_batch())
        assert {isinstance(parameter, DTensor) for parameter in model.blocks.parameters()} == {is_freed}
        inner = HandWritten()  # its root is none inside another one: torch's default would free it
        fully_shard(nn.Sequential(shard(inner, strategy=strategy)))(**{"input": hand_written_batch()["x"]})
        assert isinstance(inner.embedding.weight, DTensor) is is_freed


@on_two
def test_policies_reach_every_unit() -> None:
    model = shard(
        HandWritten(),
        mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32),
        offload_policy=CPUOffloadPolicy(pin_memory=False),
    )
    computed: set[torch.dtype] = set()
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(
                lambda module, args, _: computed.update({module.weight.dtype, args[0].dtype})
            )
        if isinstance(module, FSDPModule):
            policy = module._get_fsdp_state()._fsdp_param_group.offload_policy
            assert isinstance(policy, CPUOffloadPolicy)
    (output,) = model(**hand_written_batch())
    output.sum().backward()
    assert computed == {torch.bfloat16}  # also in the head: output_dtype is of the model's output alone
    assert {parameter.dtype for parameter in model.parameters()} == {output.dtype} == {torch.float32}


@on_two
def test_a_torch_whose_gloo_adds_gradients_up_is_refused() -> None:
    with patch.object(torch, "__version__", TorchVersion("2.9.0")):
        shard(HandWritten())
    expected = "^shard: on ranks that talk through gloo, FSDP2 expects torch 2.9 or later"
    with (
        patch.object(torch, "__version__", TorchVersion("2.8.0+cu128")),
        pytest.raises(RuntimeError, match=expected + r".*found 2\.8\.0\+cu128"),
    ):
        shard(HandWritten())


# ---- replicas ----


@on_four
def test_hybrid_shards_within_a_host_and_replicas_get_the_first_ones_values() -> None:
    options: dict[str, Any] = {"mesh": hybrid_mesh(2, 2), "strategy": "hybrid"}
    assert_trains_alike(HandWritten, hand_written_batch, 4, **options)
    torch.manual_seed(0)
    expected = HandWritten().state_dict() | {"own": torch.zeros(2, dtype=torch.bfloat16)}
    replica = dist.get_rank() // 2
    torch.manual_seed(replica)
    model = HandWritten()
    model.register_buffer("own", torch.full((2,), float(replica), dtype=torch.bfloat16))
    model.register_buffer("empty", torch.zeros(0), persistent=False)
    shard(model, **options)
    assert {str(parameter.placements) for parameter in model.parameters()} == {"(Replicate(), Shard(dim=0))"}
    values = model.state_dict()
    assert [n for n, value in expected.items() if not torch.equal(whole(values[n]), value)] == []
    assert check_sharding(model) == []


@on_two
def test_replicas_that_cannot_be_made_equal_are_refused_on_every_rank() -> None:
    rank = dist.get_rank()
    for device, size in (("meta" if rank else "cpu", 0), ("cpu", 2 + rank)):
        with torch.device(device):
            model = HandWritten()
            model.register_buffer("own", torch.zeros(size))
        alike = r"(?s)^shard: expected the same .*Build the model alike on all ranks, or on meta on all\.$"
        with pytest.raises(RuntimeError, match=alike):
            shard(model, strategy="hybrid", mesh=hybrid_mesh(2, 1))
    with torch.device("meta"):
        shard(HandWritten(), strategy="hybrid", mesh=hybrid_mesh(2, 1))  # none has values yet


# ---- what is refused, and what is not ----


def scaled() -> nn.Module:
    model = HandWritten()
    model.blocks[0].scale = nn.Parameter(torch.tensor(0.7))
    return model


STRATEGIES = 'expected strategy "full", "grad_op" or "hybrid", found '
REFUSED: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], str]] = {
    "strategy": (HandWritten, {"strategy": "NO_SHARD"}, f"^shard: {STRATEGIES}'NO_SHARD'"),
    "no mesh": (HandWritten, {"strategy": "hybrid"}, 'strategy "hybrid" expects a 2-D mesh, found a 1-D'),
    "square": (HandWritten, {}, r'strategy "full" expects a 1-D mesh, found a 2-D one\.'),
    "offload": (HandWritten, {"offload_policy": True}, "expected offload_policy to be a CPUOffloadPolicy"),
    "FSDP1": (lambda: fsdp1(HandWritten()), {}, "expected a model without FSDP1 and DDP"),
    "policy with checkpointing": (
        HandWritten,
        {"mp_policy": torch.bfloat16, "checkpointing": "full"},
        "dataclass instances",
    ),
    "scalar": (
        scaled,
        {},
        "fully_shard doesn't support scalar parameters, found blocks.0.scale. Give it a dim",
    ),
}


@on_two
def test_what_cannot_be_sharded_is_refused_before_anything_changes() -> None:
    def parts(model: nn.Module) -> list[Any]:
        return [part for module in model.modules() for part in (type(module), *module._parameters.values())]

    for name, (make, options, words) in REFUSED.items():
        model = make()
        before = parts(model)
        with case(name):
            with pytest.raises((ValueError, TypeError), match=words):
                shard(model, **options, **({"mesh": hybrid_mesh(2, 1)} if name == "square" else {}))
            assert all(new is old for new, old in zip(parts(model), before, strict=True))


@on_two
def test_torch_says_what_was_sharded_before() -> None:
    for change in (shard, lambda model: fully_shard(model.blocks[1])):
        change(model := HandWritten())
        with pytest.raises(AssertionError, match="fully_shard has already been applied to the following"):
            shard(model)


class Listed(nn.ModuleList):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self:
            x = block(x)
        return x


class Uncalled(nn.Module):
    """Has another method than forward, as register_fsdp_forward_method takes it."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = Listed([Block(), Block()])


@on_two
def test_unusual_models_are_sharded() -> None:
    model = HandWritten()
    fully_shard(model.embedding)  # other modules than blocks may be units already
    fully_shard(model.blocks[0].mlp)
    for unusual in (Listed([Block(), Block()]), Uncalled(), model):
        assert check_sharding(shard(unusual)) == []
