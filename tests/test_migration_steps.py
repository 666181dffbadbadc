"""Steps of translated programs on ranks, held against FSDP1, one process and the frameworks."""

import copy
import warnings
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from fsdp_utils import record_collectives, run_on_ranks
from fsdp_utils.migration import translate
from tests.blocks import Block

BF16 = torch.bfloat16
FSDP = {"fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "fsdp_transformer_layer_cls_to_wrap": "Block"}
DEEPSPEED = {"zero_optimization": {"stage": 3}, "bf16": {"enabled": True}}
ACCELERATE = {"distributed_type": "FSDP", "mixed_precision": "bf16", "fsdp_config": FSDP}
AXOLOTL = {"base_model": "x", "bf16": "auto", "fsdp_config": FSDP}
# a config, and whether the optimizer of its program updates float32 weights
EXECUTED: list[tuple[dict[str, Any], bool]] = [
    (DEEPSPEED, True),
    (ACCELERATE, True),
    ({**AXOLOTL, "fsdp_version": 2}, False),  # axolotl replaces Accelerate's function that makes them float32
]


def made(dtype: torch.dtype = BF16) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), *(Block(32, 64) for _ in range(3))).to(dtype)
    model[0].bias.requires_grad_(dtype != BF16)
    return model


def batch(rank: int, number: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * number + rank)
    return torch.randn(16, 32, generator=generator).to(BF16)


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return (model(x).float() - 1).square().mean()


def sharded(config: dict[str, Any], model: nn.Module) -> Any:
    translation = translate(config)
    translation.blocks = ("Block",)  # as Accelerate is told; this model has no transformer blocks
    names: dict[str, Any] = {}
    exec(translation.code(), names)
    return names["shard_model"](model)


def moved(after: list[torch.Tensor], before: list[torch.Tensor]) -> float:
    """The share of weights that are no longer what they were."""
    pairs = zip(after, before, strict=True)
    return torch.cat([(new.float() != old.float()).flatten() for new, old in pairs]).float().mean().item()


def moved_by_the_old_rule(weights_dtype: torch.dtype) -> float:
    """The same in plain PyTorch: forward and backward in bf16, AdamW on weights of this dtype."""
    low = made()
    before = [p.detach().clone() for p in low.parameters() if p.requires_grad]
    trained = [p for p in low.parameters() if p.requires_grad]
    weights = [p.to(weights_dtype).requires_grad_() for p in copy.deepcopy(before)]
    optimizer = torch.optim.AdamW(weights, lr=1e-6)
    for _ in range(20):
        (sum(loss_of(low, batch(rank)) for rank in range(2)) / 2).backward()
        for weight, parameter in zip(weights, trained, strict=True):
            weight.grad = parameter.grad.to(weights_dtype)
            parameter.grad = None
        optimizer.step()
        with torch.no_grad():
            for weight, parameter in zip(weights, trained, strict=True):
                parameter.copy_(weight)
    return moved([weight.detach() for weight in weights], before)


def test_small_steps_move_the_weights_that_the_old_program_moved() -> None:
    def fn() -> list[tuple[float, set[torch.dtype]]]:
        found = []
        for config, _ in EXECUTED:
            model = sharded(config, made())
            trained = [p for p in model.parameters() if p.requires_grad]
            optimizer = torch.optim.AdamW(trained, lr=1e-6)
            before = [p.full_tensor().detach().clone() for p in trained]
            for _ in range(20):
                loss_of(model, batch(dist.get_rank())).backward()
                optimizer.step()
                optimizer.zero_grad()
            share = moved([p.full_tensor().detach() for p in trained], before)
            found.append((share, {p.dtype for p in model.parameters() if not p.requires_grad}))
        return found

    masters, pure = moved_by_the_old_rule(torch.float32), moved_by_the_old_rule(BF16)
    assert masters > 0.98
    assert pure < 0.05
    for found in run_on_ranks(fn, world_size=2):
        for (share, frozen), (config, has_masters) in zip(found, EXECUTED, strict=True):
            assert share == pytest.approx(masters if has_masters else pure, abs=0.01), config
            assert frozen == {BF16}  # Accelerate leaves what is not trained as it is


def test_zero_1_gathers_and_reduces_once_however_many_batches_a_step_has() -> None:
    accumulated = {"gradient_accumulation_steps": 4}

    def fn() -> dict[str, Any]:
        found = {}
        for name, stage, methods in (("zero 1", 1, 2), ("sync alone", 1, 1), ("full shard", 3, 0)):
            model = sharded({"zero_optimization": {"stage": stage}, **accumulated}, made())
            with record_collectives(model) as trace:
                for number in range(4):
                    last = number == 3
                    if methods > 0:
                        model.set_requires_gradient_sync(last)
                    if methods > 1:
                        model.set_reshard_after_backward(last)
                    loss_of(model, batch(dist.get_rank(), number)).backward()
            kinds = [event.kind for event in trace.events]
            gradients = [p.grad.full_tensor() for p in model.parameters() if p.requires_grad]
            sent = kinds.count("all_gather"), kinds.count("reduce_scatter")
            found[name] = sent, torch.cat([gradient.flatten() for gradient in gradients])
        return found

    for found in run_on_ranks(fn, world_size=2):
        sent = {name: counts for name, (counts, _) in found.items()}
        assert sent == {"zero 1": (4, 4), "sync alone": (16, 4), "full shard": (28, 16)}
        whole = found["full shard"][1]
        for _, gradients in found.values():
            assert (gradients - whole).norm() < 0.02 * whole.norm()


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


def test_translated_runs_have_the_losses_and_the_bytes_of_fsdp1() -> None:
    def fn() -> dict[str, Any]:
        warnings.simplefilter("ignore")  # NO_SHARD is deprecated
        found = {"plain": (trained(in_fsdp1), None)}
        for name, (config, options) in CASES.items():
            old = None if options is None else trained(partial(in_fsdp1, **options))
            found[name] = trained(partial(sharded, config)), old
        return found

    for found in run_on_ranks(fn, world_size=2):
        (plain, _), _ = found.pop("plain")
        for name, ((losses, sent), old) in found.items():
            low = translate(CASES[name][0]).param_dtype is not None
            assert losses == pytest.approx(plain, rel=2e-2 if low else 1e-5), name
            if old is not None:
                assert losses == pytest.approx(old[0], rel=1e-3 if low else 1e-5), name
                assert sent == old[1], name
