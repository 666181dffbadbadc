"""Steps of translated programs on two ranks: the weights that AdamW moves, and what accumulating sends."""

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_utils import record_collectives, run_on_ranks
from fsdp_utils.migration import translate

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
OTHERS: list[tuple[dict[str, Any], bool]] = [
    ({**AXOLOTL, "fsdp_version": 1}, True),
    ({"fsdp": "full_shard auto_wrap", "bf16": True, "fsdp_config": FSDP}, True),
    ({**DEEPSPEED, "zero_optimization": {"stage": 0}}, True),
    ({**ACCELERATE, "fsdp_config": {"fsdp_sharding_strategy": "NO_SHARD"}}, True),
    ({**ACCELERATE, "distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stage": 2}}, True),
    ({**ACCELERATE, "mixed_precision": "fp8"}, True),  # which has bf16 beside it
    (
        {
            "distributed_type": "DEEPSPEED",
            "mixed_precision": "fp8",
            "deepspeed_config": {"deepspeed_config_file": {**DEEPSPEED, "bf16": {"enabled": "auto"}}},
        },
        True,
    ),
    # a policy without mixed precision: Accelerate leaves the weights as they are
    (
        {"base_model": "x", "fsdp_version": 1, "fsdp_config": {**FSDP, "mixed_precision_policy": "bf16"}},
        False,
    ),
    ({**ACCELERATE, "distributed_type": "MULTI_GPU"}, False),
    ({**ACCELERATE, "mixed_precision": "no"}, False),
    ({**DEEPSPEED, "bf16": {"enabled": True, "bf16_master_weights_and_grads": True}}, False),
    ({"precision": "amp_bf16", "fsdp_config": {}}, False),
]


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.up, self.down, self.dropout = nn.Linear(32, 64), nn.Linear(64, 32), nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.down(self.up(x).relu()))


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


def made(dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), *(Block(dropout) for _ in range(3))).to(BF16)
    model[0].bias.requires_grad_(False)
    return model


def batch(rank: int, number: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * number + rank)
    return torch.randn(16, 32, generator=generator).to(BF16)


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return (model(x).float() - 1).square().mean()


def sharded(config: dict[str, Any], **options: Any) -> Any:
    translation = translate(config)
    translation.blocks = ("Block",)
    names: dict[str, Any] = {}
    exec(translation.code(), names)
    return names["shard_model"](made(**options))


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
            model = sharded(config)
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


@pytest.mark.parametrize(("config", "has_masters"), EXECUTED + OTHERS)
def test_float32_weights_are_told_where_the_old_program_has_them(
    config: dict[str, Any], has_masters: bool
) -> None:
    found = translate(config)
    assert ("parameter.data.float()" in found.code()) is has_masters
    assert any("float32 weights" in text for text in found.without_counterpart) is has_masters


def test_buffers_without_sharding_train_beside_float32_weights() -> None:
    def fn() -> list[float]:
        names: dict[str, Any] = {}
        exec(translate({**DEEPSPEED, "zero_optimization": {"stage": 0}}).code(), names)
        frozen = nn.LayerNorm(32).requires_grad_(False)  # stays in bf16, as the buffer before it has to
        model = names["shard_model"](nn.Sequential(made(), Scaled(), frozen, nn.BatchNorm1d(32)).to(BF16))
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        losses = []
        for _ in range(4):
            with torch.autocast("cpu", dtype=BF16):
                loss = loss_of(model, batch(dist.get_rank()))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    for losses in run_on_ranks(fn, world_size=2):
        assert losses == sorted(losses, reverse=True)


def test_zero_1_gathers_and_reduces_once_however_many_batches_a_step_has() -> None:
    accumulated = {"gradient_accumulation_steps": 4}
    first = {"zero_optimization": {"stage": 1}, **accumulated}

    def fn() -> dict[str, Any]:
        found = {}
        for name, stage, methods in (("zero 1", 1, 2), ("sync alone", 1, 1), ("full shard", 3, 0)):
            model = sharded({"zero_optimization": {"stage": stage}, **accumulated})
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
    for config, rows in (
        (first, ("stage", "gradient_accumulation_steps")),
        ({**first, "zero_optimization": {"stage": 2}}, ("gradient_accumulation_steps",)),
        (
            {
                "distributed_type": "FSDP",
                "fsdp_config": {"fsdp_sharding_strategy": "SHARD_GRAD_OP"},
                **accumulated,
            },
            ("fsdp_sharding_strategy", "gradient_accumulation_steps"),
        ),
        ({"distributed_type": "FSDP", "fsdp_config": {"reshard_after_forward": False}}, ("_after_forward",)),
    ):
        words = {row.key: row for row in translate(config).rows if row.key.endswith(rows)}
        assert len(words) == len(rows)
        for row in words.values():
            assert row.has_counterpart
            assert "set_requires_gradient_sync" in row.fsdp2
            assert "set_reshard_after_backward" in row.fsdp2


def test_dropout_is_recomputed_as_it_was_and_by_accelerate_it_is_not() -> None:
    fsdp = {**FSDP, "fsdp_version": 2, "fsdp_activation_checkpointing": True}
    config = {"distributed_type": "FSDP", "fsdp_config": fsdp}

    def by_accelerate(model: nn.Module) -> nn.Module:
        from accelerate import FullyShardedDataParallelPlugin
        from accelerate.utils.fsdp_utils import fsdp2_apply_ac

        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["Block"]
        )
        plugin.set_auto_wrap_policy(model)
        return fsdp2_apply_ac(SimpleNamespace(state=SimpleNamespace(fsdp_plugin=plugin)), model)

    def gradients(model: nn.Module) -> torch.Tensor:
        torch.manual_seed(1)
        loss_of(model, batch(0)).backward()
        found = [p.grad for p in model.parameters() if p.grad is not None]
        return torch.cat([(g.full_tensor() if isinstance(g, DTensor) else g).flatten() for g in found])

    def fn() -> list[float]:
        plain = gradients(made(dropout=0.1))
        others = gradients(sharded(config, dropout=0.1)), gradients(by_accelerate(made(dropout=0.1)))
        return [((other - plain).norm() / plain.norm()).item() for other in others]

    for ours, theirs in run_on_ranks(fn, world_size=2):
        assert ours < 0.01
        assert theirs > 0.05
    said = next(row for row in translate(config).rows if row.key.endswith("activation_checkpointing"))
    assert "preserve_rng_state=False" in said.fsdp2
