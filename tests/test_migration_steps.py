"""Steps of translated programs on ranks, held against FSDP1, one process and the frameworks."""

import warnings
from contextlib import nullcontext
from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from fsdp_utils import record_collectives
from fsdp_utils.migration import translate
from tests.blocks import Block
from tests.on_ranks import case, on_ranks

BF16 = torch.bfloat16
FSDP = {"fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "fsdp_transformer_layer_cls_to_wrap": "Block"}


def made(dtype: torch.dtype = BF16) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), *(Block(32, 64) for _ in range(3))).to(dtype)
    model[0].bias.requires_grad_(dtype != BF16)
    return model


def batch(rank: int, number: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * number + rank)
    return torch.randn(16, 32, generator=generator).to(BF16)


def sharded(config: dict[str, Any], model: nn.Module) -> Any:
    translation = translate(config)
    translation.blocks = ("Block",)  # as Accelerate is told; this model has no transformer blocks
    names: dict[str, Any] = {}
    exec(translation.code(), names)
    return names["shard_model"](model)


@on_ranks()
def test_zero_1_gathers_and_reduces_once_however_many_batches_a_step_has() -> None:
    def accumulated(stage: int, methods: int) -> tuple[tuple[int, int], torch.Tensor]:
        """Gathers and reduces of four batches, and the gradients after them."""
        config = {"zero_optimization": {"stage": stage}, "gradient_accumulation_steps": 4}
        model = sharded(config, made())
        with record_collectives(model) as trace:
            for number in range(4):
                if methods > 0:
                    model.set_requires_gradient_sync(number == 3)
                if methods > 1:
                    model.set_reshard_after_backward(number == 3)
                loss = (model(batch(dist.get_rank(), number)).float() - 1).square().mean()
                loss.backward()
        kinds = [event.kind for event in trace.events]
        gradients = [p.grad.full_tensor().flatten() for p in model.parameters() if p.requires_grad]
        return (kinds.count("all_gather"), kinds.count("reduce_scatter")), torch.cat(gradients)

    sent, expected = accumulated(3, 0)
    assert sent == (28, 16)
    for methods, counts in ((2, (4, 4)), (1, (16, 4))):
        sent, gradients = accumulated(1, methods)
        assert sent == counts
        assert (gradients - expected).norm() < 0.02 * expected.norm()


# ---- losses and bytes


def of_accelerate(mixed_precision: str = "no", **fsdp: Any) -> dict[str, Any]:
    return {"distributed_type": "FSDP", "mixed_precision": mixed_precision, "fsdp_config": {**FSDP, **fsdp}}


def of_composer(precision: str = "fp32", **fsdp: Any) -> dict[str, Any]:
    return {"precision": precision, "parallelism_config": {"fsdp": fsdp}}


def of_deepspeed(stage: int = 3, *, above: dict[str, Any] | None = None, **zero: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage, **zero}, **(above or {})}


def trained(shard_model: Any) -> tuple[list[float], dict[str, int]]:
    """Losses of three steps, and the bytes of the last: in the second DDP arranges its buckets."""
    model = shard_model(made(torch.float32))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    x = batch(dist.get_rank()).float()
    losses = []
    for _ in range(3):
        with record_collectives(model) as trace:
            loss = model(x).float().square().mean()
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, trace.bytes_by_kind()


def in_fsdp1(model: nn.Module, *, checkpointing: bool = False, **options: Any) -> nn.Module:
    device = torch.device("cpu")
    model = FullyShardedDataParallel(
        model, auto_wrap_policy=ModuleWrapPolicy({Block}), device_id=device, **options
    )
    if checkpointing:
        apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, Block))
    return model


# a config, and what it is in FSDP1: by the sources of Accelerate and Composer, and torch's documentation
LOW = MixedPrecision(param_dtype=BF16, reduce_dtype=BF16, buffer_dtype=BF16)
CASES: dict[str, tuple[dict[str, Any], dict[str, Any] | None]] = {
    "full": (of_accelerate(fsdp_sharding_strategy="FULL_SHARD", fsdp_backward_prefetch="BACKWARD_PRE"), {}),
    "by number": (
        of_accelerate(fsdp_sharding_strategy=2, fsdp_use_orig_params=True),
        {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP, "use_orig_params": True},
    ),
    "none": (
        of_accelerate(fsdp_sharding_strategy="NO_SHARD"),
        {"sharding_strategy": ShardingStrategy.NO_SHARD},
    ),
    "recompute": (of_accelerate(fsdp_activation_checkpointing=True), {"checkpointing": True}),
    "bf16": (of_accelerate("bf16"), {"mixed_precision": LOW}),
    "composer default": (
        of_composer("amp_bf16"),
        {"mixed_precision": MixedPrecision(param_dtype=BF16, reduce_dtype=torch.float32)},
    ),
    "composer pure": (
        of_composer("amp_bf16", mixed_precision="PURE", sharding_strategy="shard_grad_op"),
        {
            "mixed_precision": MixedPrecision(param_dtype=BF16, reduce_dtype=BF16),
            "sharding_strategy": ShardingStrategy.SHARD_GRAD_OP,
        },
    ),
    "zero 2": (of_deepspeed(2), {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP}),
    "zero 1": (of_deepspeed(1), None),
    "zero 0": (of_deepspeed(0), {"sharding_strategy": ShardingStrategy.NO_SHARD}),
    "offload": (of_deepspeed(3, offload_param={"device": "cpu", "pin_memory": False}), None),
}


@on_ranks()
def test_translated_runs_have_the_losses_and_the_bytes_of_fsdp1() -> None:
    warnings.simplefilter("ignore")  # NO_SHARD is deprecated
    plain, _ = trained(in_fsdp1)
    for name, (config, options) in CASES.items():
        with case(name):
            losses, sent = trained(partial(sharded, config))
            low = translate(config).param_dtype is not None
            assert losses == pytest.approx(plain, rel=2e-2 if low else 1e-5)
            if options is not None:
                old_losses, old_sent = trained(partial(in_fsdp1, **options))
                assert losses == pytest.approx(old_losses, rel=1e-3 if low else 1e-5)
                assert sent == old_sent


def with_batch_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8))


@on_ranks()
def test_batch_norm_in_bf16_needs_a_unit_of_its_own_in_fsdp2_and_gets_one_in_fsdp1() -> None:
    dtypes: dict[str, Any] = {"param_dtype": BF16, "reduce_dtype": torch.float32}
    x, mesh = torch.randn(4, 8), init_device_mesh("cpu", (dist.get_world_size(),))
    old = FullyShardedDataParallel(
        with_batch_norm(),
        auto_wrap_policy=ModuleWrapPolicy(set()),
        device_id=torch.device("cpu"),
        mixed_precision=MixedPrecision(**dtypes),
    )
    old(x).sum().backward()

    one, two = with_batch_norm(), with_batch_norm()
    fully_shard(one, mesh=mesh, mp_policy=MixedPrecisionPolicy(**dtypes))
    with pytest.raises(RuntimeError, match="expected scalar type BFloat16 but found Float"):
        one(x)

    seen: list[torch.dtype] = []
    two[1].register_forward_pre_hook(lambda norm, args: seen.append(norm.weight.dtype))
    fully_shard(two[1], mesh=mesh)
    fully_shard(two, mesh=mesh, mp_policy=MixedPrecisionPolicy(**dtypes))
    two(x).sum().backward()
    assert seen == [torch.float32]


def full_weights(model: nn.Module) -> dict[str, Any]:
    return get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))


def gradient_error(version: int, batches: int) -> float:
    """The error of a layer's gradient in %, after so many batches in bf16, against one float32 process."""
    dtypes: dict[str, Any] = {"param_dtype": BF16, "reduce_dtype": torch.float32}
    torch.manual_seed(0)
    alone = nn.Linear(64, 64, bias=False)
    model: Any = deepcopy(alone)
    if version == 1:
        model = FullyShardedDataParallel(
            model, device_id=torch.device("cpu"), mixed_precision=MixedPrecision(**dtypes)
        )
    else:
        fully_shard(model, mp_policy=MixedPrecisionPolicy(**dtypes))
    for number in range(batches):
        x, last = torch.randn(32, 64, generator=torch.Generator().manual_seed(number)), number == batches - 1
        alone(x).square().mean().backward()
        if version == 2:
            model.set_requires_gradient_sync(last)
        with model.no_sync() if version == 1 and not last else nullcontext():
            model(x.chunk(4)[dist.get_rank()]).float().square().mean().backward()
    torch.optim.SGD(model.parameters(), lr=1.0).step()  # now the weights have changed by the gradient
    whole = full_weights(model)["weight"]
    right = alone.weight.grad
    assert right is not None
    return 100 * float((alone.weight.detach() - whole - right).norm() / right.norm())


@on_ranks(4)
def test_fsdp1_adds_batches_in_bf16_and_fsdp2_in_float32() -> None:
    one, two = ([gradient_error(version, batches) for batches in (2, 128)] for version in (1, 2))
    assert one == pytest.approx([0.3, 0.6], abs=0.05)
    assert two == pytest.approx([0.3, 0.2], abs=0.05)


@on_ranks()
def test_fsdp1_decays_layers_that_forward_does_not_use_and_fsdp2_does_not() -> None:
    class Unused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.spare = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.used(x)

    def kept(shard: Any) -> float:
        """How much of the unused weights is left after five steps."""
        torch.manual_seed(0)
        model = Unused()
        before = model.spare.weight.detach().clone()
        model = shard(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=1.0)
        for _ in range(5):
            model(torch.ones(2, 8)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return float(full_weights(model)["spare.weight"].norm() / before.norm())

    assert kept(partial(FullyShardedDataParallel, device_id=torch.device("cpu"))) == pytest.approx(0.99**5)
    assert kept(fully_shard) == kept(lambda model: model) == 1
