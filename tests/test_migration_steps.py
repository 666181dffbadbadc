"""Steps of translated programs on ranks, held against FSDP1, one process and the frameworks."""

import re
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
    StateDictType,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from fsdp_utils import record_collectives, run_on_ranks
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


def zero_1_gathers_and_reduces_once_however_many_batches_a_step_has() -> None:
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


def translated_runs_have_the_losses_and_the_bytes_of_fsdp1() -> None:
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


def batch_norm_in_bf16_needs_a_unit_of_its_own_in_fsdp2_and_gets_one_from_a_policy_in_fsdp1() -> None:
    dtypes: dict[str, Any] = {"param_dtype": BF16, "reduce_dtype": torch.float32}
    x, mesh = torch.randn(4, 8), init_device_mesh("cpu", (dist.get_world_size(),))
    old = FullyShardedDataParallel(
        with_batch_norm(),
        auto_wrap_policy=ModuleWrapPolicy(set()),
        device_id=torch.device("cpu"),
        mixed_precision=MixedPrecision(**dtypes),
    )
    old(x).sum().backward()
    alone = FullyShardedDataParallel(
        with_batch_norm(), device_id=torch.device("cpu"), mixed_precision=MixedPrecision(**dtypes)
    )
    with pytest.raises(RuntimeError, match="expected scalar type BFloat16 but found Float"):
        alone(x)

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


def gradient_error(version: int, batches: int, reduce_dtype: torch.dtype | None = torch.float32) -> float:
    """The error of a layer's gradient in %, after so many batches in bf16, against one float32 process."""
    dtypes: dict[str, Any] = {"param_dtype": BF16, "reduce_dtype": reduce_dtype}
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


def fsdp1_adds_batches_in_bf16_and_fsdp2_in_float32_if_told_to_reduce_in_it() -> None:
    one, two = ([gradient_error(version, batches) for batches in (2, 128, 1024)] for version in (1, 2))
    assert one == pytest.approx([0.3, 0.6, 3.7], abs=0.06)
    assert two == pytest.approx([0.3, 0.2, 0.2], abs=0.06)
    assert gradient_error(2, 1024, reduce_dtype=None) > 3


class Layers(nn.Module):
    """Two layers; forward skips the second in the steps that `skip` names."""

    def __init__(self, *, skip: Callable[[int], bool]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.used, self.spare, self.skip, self.number = nn.Linear(8, 8), nn.Linear(8, 8), skip, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.used(x) if self.skip(self.number) else self.spare(self.used(x))
        self.number += 1
        return x


def spare_weights(model: Any, optimizer: type[torch.optim.Optimizer], steps: int, **options: Any) -> Any:
    """The weights of the layer `spare` before the last step, and after it."""
    updates = optimizer(model.parameters(), **options)  # type: ignore[call-arg]
    for _ in range(steps):
        before = full_weights(model)["spare.weight"].clone()
        model(torch.ones(2, 8)).sum().backward()
        updates.step()
        updates.zero_grad()
    return before, full_weights(model)["spare.weight"]


def one_unit_of_fsdp1(model: nn.Module) -> nn.Module:
    return FullyShardedDataParallel(model, device_id=torch.device("cpu"))


def fsdp1_decays_layers_that_forward_does_not_use_and_fsdp2_does_not() -> None:
    def kept(shard: Any) -> float:
        """How much of the unused weights is left after one step."""
        model = shard(Layers(skip=lambda number: True))
        before, after = spare_weights(model, torch.optim.AdamW, 1, lr=1e-2, weight_decay=1.0)
        return float(after.norm() / before.norm())

    def own_unit(model: nn.Module) -> nn.Module:  # forward skips the unit as a whole
        policy = ModuleWrapPolicy({nn.Linear})
        return FullyShardedDataParallel(model, auto_wrap_policy=policy, device_id=torch.device("cpu"))

    assert kept(one_unit_of_fsdp1) == pytest.approx(0.99)
    assert kept(fully_shard) == kept(own_unit) == kept(lambda model: model) == 1


def momentum_moves_a_layer_in_a_step_that_skips_it_in_fsdp1_and_not_in_fsdp2() -> None:
    def moved(shard: Any) -> float:
        before, after = spare_weights(
            shard(Layers(skip=lambda number: number == 2)), torch.optim.Adam, 3, lr=1e-2
        )
        return float((after - before).abs().max())

    assert moved(one_unit_of_fsdp1) > 0.005
    assert moved(fully_shard) == moved(lambda model: model) == 0


def bytes_sent(model: Any, x: torch.Tensor, batches: int = 1) -> dict[str, int]:
    """The bytes of the second of two steps, each of so many batches that are all reduced."""
    for _ in range(2):
        with record_collectives(model) as trace:
            for _ in range(batches):
                model(x).square().mean().backward()
        model.zero_grad()
    return trace.bytes_by_kind()


def in_fsdp2(model: Any, **options: Any) -> Any:
    for block in model[1:]:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def what_is_sent_differs_only_under_its_condition() -> None:
    x = batch(dist.get_rank()).float()
    with case("without no_sync, SHARD_GRAD_OP gathers once a batch in both"):
        old = in_fsdp1(made(torch.float32), sharding_strategy=ShardingStrategy.SHARD_GRAD_OP)
        new = in_fsdp2(made(torch.float32), reshard_after_forward=False)
        assert bytes_sent(old, x, batches=2) == bytes_sent(new, x, batches=2)

    with case("a unit that is frozen as a whole is reduced by neither"):
        one, two = made(torch.float32), made(torch.float32)
        for model in (one, two):
            model[2].requires_grad_(False)
        frozen = bytes_sent(in_fsdp1(one), x)
        assert frozen == bytes_sent(in_fsdp2(two), x)
        assert frozen["reduce_scatter"] < bytes_sent(in_fsdp1(made(torch.float32)), x)["reduce_scatter"]

    with case("5 rows on 4 ranks are padded to 8"):
        rows = [
            bytes_sent(shard(nn.Linear(32, 5, bias=False)), x)["reduce_scatter"]
            for shard in (one_unit_of_fsdp1, fully_shard)
        ]
        assert rows == [5 * 32 * 4, 8 * 32 * 4]


def a_file_of_shards_says_so_only_when_it_is_read() -> None:
    model = fully_shard(nn.Linear(4, 4))
    with tempfile.TemporaryDirectory() as folder:
        torch.save(model.state_dict(), f"{folder}/shards.pt")
        read = f"import torch; torch.load('{folder}/shards.pt')"
        done = subprocess.run([sys.executable, "-c", read], capture_output=True, text=True)
    assert "torch.distributed.tensor must be imported to load DTensors" in done.stderr.replace("`", "")


TEXT = next((Path(__file__).parents[1] / "notebooks/src").glob("13_*.py")).read_text(encoding="utf-8")
ONE, TWO = (
    re.sub(r"^# ", "", code, flags=re.MULTILINE)
    for code in re.findall(r"# ```python\n(.*?)# ```\n", TEXT, re.DOTALL)[:2]
)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block(32, 64) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def the_two_listings_of_the_lesson_clip_and_save_the_same() -> None:
    def outcome(code: str) -> tuple[float, dict[str, torch.Tensor]]:
        names: dict[str, Any] = {
            "torch": torch,
            "nn": nn,
            "nullcontext": nullcontext,
            "Block": Block,
            "ModuleWrapPolicy": ModuleWrapPolicy,
            "MixedPrecision": MixedPrecision,
            "MixedPrecisionPolicy": MixedPrecisionPolicy,
            "fully_shard": fully_shard,
            "StateDictOptions": StateDictOptions,
            "get_model_state_dict": get_model_state_dict,
            "FSDP": partial(FullyShardedDataParallel, device_id=torch.device("cpu")),
            "model": Model(),
            "batches": [batch(dist.get_rank(), number).float() for number in range(3)],
            "loss_of": lambda model, x: model(x).float().square().mean(),
        }
        exec(code, names)
        return names["norm"].item(), names["weights"]

    (old_norm, old), (norm, new) = outcome(ONE), outcome(TWO)
    assert norm == pytest.approx(old_norm, rel=0.01)
    assert old.keys() == new.keys()
    assert all(torch.equal(old[name], new[name]) for name in old)


def play(*scenes: Callable[[], None]) -> None:
    for scene in scenes:
        with case(scene.__name__):
            scene()


@on_ranks(timeout=110)
def test_on_two_ranks() -> None:
    play(
        zero_1_gathers_and_reduces_once_however_many_batches_a_step_has,
        translated_runs_have_the_losses_and_the_bytes_of_fsdp1,
        batch_norm_in_bf16_needs_a_unit_of_its_own_in_fsdp2_and_gets_one_from_a_policy_in_fsdp1,
        fsdp1_decays_layers_that_forward_does_not_use_and_fsdp2_does_not,
        momentum_moves_a_layer_in_a_step_that_skips_it_in_fsdp1_and_not_in_fsdp2,
        a_file_of_shards_says_so_only_when_it_is_read,
        the_two_listings_of_the_lesson_clip_and_save_the_same,
    )


@on_ranks(4, timeout=110)
def test_on_four_ranks() -> None:
    play(
        fsdp1_adds_batches_in_bf16_and_fsdp2_in_float32_if_told_to_reduce_in_it,
        what_is_sent_differs_only_under_its_condition,
    )


def save_or_load(folder: Path, saved: list[float] | None = None, units: Any = None) -> list[Any]:
    """Of a local and a sharded state dict: what the model computes, or whether the load brings that back."""
    warnings.simplefilter("ignore")  # these functions of FSDP1 are deprecated
    found: list[Any] = []
    for kind in (StateDictType.LOCAL_STATE_DICT, StateDictType.SHARDED_STATE_DICT):
        torch.manual_seed(1 if saved else 0)
        model = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 10))
        model = FullyShardedDataParallel(model, device_id=torch.device("cpu"), auto_wrap_policy=units)
        try:
            with FullyShardedDataParallel.state_dict_type(model, kind), torch.no_grad():
                state = model.state_dict()
                (dcp.load if saved else dcp.save)(state, checkpoint_id=folder / kind.name)
                model.load_state_dict(state)
            found.append(model(torch.arange(64.0).view(1, 64)).sum().item())
        except CheckpointException as error:
            missing = re.search(r"Missing key in checkpoint state_dict: ([\w.]+)\.", str(error))
            found.append(f"no {missing and missing[1]}")
    if saved:
        return [value == before or value for value, before in zip(found, saved, strict=True)]
    return found


def test_a_local_state_dict_loads_with_the_same_units_on_ranks_that_shard_and_a_sharded_one_on_any(
    tmp_path: Path,
) -> None:
    saved = run_on_ranks(save_or_load, tmp_path, world_size=4)[0]
    linears = ModuleWrapPolicy({nn.Linear})
    loads = [(4, None), (3, None), (1, None), (4, linears)]
    found = [run_on_ranks(save_or_load, tmp_path, saved, units, world_size=n)[0] for n, units in loads]
    assert found == [[True, True], [True, True], ["no 0.bias", True], ["no 0._flat_param", True]]
