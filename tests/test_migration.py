"""Configs of Accelerate, Composer and DeepSpeed in FSDP2, held against FSDP1 set as the frameworks set it."""

import json
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import yaml
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from fsdp_utils import record_collectives, run_on_ranks
from fsdp_utils.migration import Translation, TranslationError, accelerate, composer, deepspeed, translate

BF16 = torch.bfloat16
UNITS = {
    "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    "fsdp_transformer_layer_cls_to_wrap": "Block",
}


def of_accelerate(mixed_precision: str = "no", **fsdp: Any) -> dict[str, Any]:
    return {"distributed_type": "FSDP", "mixed_precision": mixed_precision, "fsdp_config": {**UNITS, **fsdp}}


def of_composer(precision: str = "fp32", **fsdp: Any) -> dict[str, Any]:
    return {"precision": precision, "parallelism_config": {"fsdp": fsdp}}


def of_deepspeed(stage: int = 3, *, above: dict[str, Any] | None = None, **zero: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage, **zero}, **(above or {})}


def in_dimensions(**sizes: Any) -> dict[str, Any]:
    named = {f"parallelism_config_{name}_size": size for name, size in sizes.items()}
    return {**of_accelerate(fsdp_version=2), "parallelism_config": named}


# --- the same training


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(12, 24), nn.Linear(24, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x).relu())


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(6, 12)
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return x


def trained(shard_model: Any) -> tuple[list[float], dict[str, int]]:
    """Losses of three steps, and the bytes of the last: in the second DDP arranges its buckets."""
    torch.manual_seed(0)
    model = shard_model(Model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(dist.get_rank()))
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


def as_translated(config: Any) -> Any:
    translation = translate(config)
    translation.blocks = ("Block",)  # as Accelerate is told; this model has no transformer blocks
    names: dict[str, Any] = {}
    exec(translation.code(), names)
    return names["shard_model"]


def as_accelerate_says(config: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What Accelerate itself gives to FSDP1 for this config: its launcher's variables, read by its plugin."""
    from accelerate import FullyShardedDataParallelPlugin

    with monkeypatch.context() as environment:
        for key, value in config["fsdp_config"].items():
            environment.setenv(key.upper(), str(value).lower() if isinstance(value, bool) else str(value))
        plugin = FullyShardedDataParallelPlugin()
    if config["mixed_precision"] != "no":
        plugin.set_mixed_precision(config["mixed_precision"])
    return {
        "sharding_strategy": plugin.sharding_strategy,
        "mixed_precision": plugin.mixed_precision_policy,
        "backward_prefetch": plugin.backward_prefetch,
        "use_orig_params": plugin.use_orig_params,
        "checkpointing": plugin.activation_checkpointing,
    }


ACCELERATE = {
    "full": of_accelerate(fsdp_sharding_strategy="FULL_SHARD", fsdp_backward_prefetch="BACKWARD_PRE"),
    "by number": of_accelerate(fsdp_sharding_strategy=2, fsdp_use_orig_params=True),
    "none": of_accelerate(fsdp_sharding_strategy="NO_SHARD"),
    "recompute": of_accelerate(fsdp_activation_checkpointing=True),
    "bf16": of_accelerate("bf16"),
}
OTHERS: dict[str, tuple[dict[str, Any], dict[str, Any] | None]] = {
    # the config, and what it is in FSDP1: by Composer's source, and for ZeRO by the strategies' documentation
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


def test_translated_runs_have_the_losses_and_the_bytes_of_fsdp1(monkeypatch: pytest.MonkeyPatch) -> None:
    cases: dict[str, tuple[dict[str, Any], dict[str, Any] | None]] = {
        name: (config, as_accelerate_says(config, monkeypatch)) for name, config in ACCELERATE.items()
    }
    cases |= OTHERS

    def fn() -> dict[str, Any]:
        warnings.simplefilter("ignore")  # NO_SHARD is deprecated
        found = {"plain": (trained(in_fsdp1), None)}
        for name, (config, options) in cases.items():
            old = None if options is None else trained(partial(in_fsdp1, **options))
            found[name] = trained(as_translated(config)), old
        return found

    for found in run_on_ranks(fn, world_size=2):
        (plain, _), _ = found.pop("plain")
        for name, ((losses, sent), old) in found.items():
            low = translate(cases[name][0]).param_dtype is not None
            assert losses == pytest.approx(plain, rel=2e-2 if low else 1e-5), name
            if old is not None:
                assert losses == pytest.approx(old[0], rel=1e-3 if low else 1e-5), name
                assert sent == old[1], name


def test_tensor_parallel_ranks_of_a_mesh_train_as_one_process_does() -> None:
    config = in_dimensions(dp_shard=2, tp=2)

    def fn() -> list[float]:
        torch.manual_seed(0)
        plan = {"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()}
        model = as_translated(config)(Model(), plan)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        x = batches()[dist.get_rank() // 2]  # ranks that share a layer read the same batch
        losses = []
        for _ in range(3):
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    torch.manual_seed(0)
    model, x = Model(), torch.cat(batches())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    alone = []
    for _ in range(3):
        parts = model(x).square().mean(dim=1).reshape(2, 4).mean(dim=1)
        parts.mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        alone.append(parts.tolist())
    for rank, losses in enumerate(run_on_ranks(fn, world_size=4)):
        assert losses == pytest.approx([parts[rank // 2] for parts in alone], rel=1e-4)


def batches() -> list[torch.Tensor]:
    return [torch.randn(4, 6, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1)]


# --- what a config becomes


def test_fp16_needs_a_scaler_in_all_frameworks() -> None:
    for config in (
        of_accelerate("fp16"),
        of_composer("amp_fp16"),
        of_deepspeed(above={"fp16": {"enabled": True}}),
    ):
        found = translate(config)
        assert found.param_dtype == "float16"
        assert any("torch.amp.GradScaler scales the loss" in row.fsdp2 for row in found.rows)
    assert "GradScaler" not in str(translate(of_accelerate("bf16"))) + translate(of_accelerate("bf16")).code()


def test_gradscaler_skips_a_step_on_all_ranks_when_one_shard_overflows() -> None:
    """What the row on fp16 promises: the scaler of torch.amp, and none of FSDP's own, sees all shards."""

    def fn() -> list[tuple[bool, float]]:
        warnings.simplefilter("ignore")  # DTensor's, on found_inf having one dimension
        found = []
        for overflow in (False, True):
            model = fully_shard(nn.Linear(4, 4))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
            scaler.scale(model(torch.ones(2, 4)).sum()).backward()
            before = model.weight.to_local().clone()
            if overflow and dist.get_rank() == 1:
                model.weight.grad.to_local().fill_(torch.inf)
            scaler.step(optimizer)
            scaler.update()
            found.append((torch.equal(before, model.weight.to_local()), scaler.get_scale()))
        return found

    for found in run_on_ranks(fn, world_size=2):
        assert found == [(False, 8.0), (True, 4.0)]


def test_the_optimizer_that_deepspeed_calls_adam() -> None:
    def row(kind: str, **params: Any) -> str:
        config = of_deepspeed(above={"optimizer": {"type": kind, "params": params}})
        found = translate(config)
        assert found.without_counterpart == []
        return next(row.fsdp2 for row in found.rows if row.key == "optimizer")

    assert row("Adam").startswith("torch.optim.AdamW,")
    assert row("Adam", adam_w_mode=False).startswith("torch.optim.Adam,")
    assert row("AdamW", adam_w_mode=False).startswith("torch.optim.AdamW,")
    assert row("SGD").startswith("torch.optim.SGD,")
    assert all(hasattr(torch.optim, name) for name in deepspeed.OPTIMIZERS)
    assert all(hasattr(torch.optim.lr_scheduler, name) for name in deepspeed.SCHEDULERS)


def test_parallelism_of_one_copy_is_sharded_over_all_ranks() -> None:
    assert translate(in_dimensions(dp_shard=8)).shard_size is None
    both = translate(in_dimensions(dp_replicate=2, dp_shard=4))
    assert (both.copies, both.shard_size) == (2, 4)
    assert translate({**of_accelerate(), "parallelism_config": {}}).without_counterpart == []


def test_each_key_has_a_row_and_what_is_lost_says_why() -> None:
    config = of_accelerate(
        "bf16",
        fsdp_state_dict_type="LOCAL_STATE_DICT",
        fsdp_sync_module_states=True,
        fsdp_forward_prefetch=False,
    )
    found = translate(config)
    keys = {row.key for row in found.rows}
    assert keys == {
        "distributed_type",
        "mixed_precision",
        *(f"fsdp_config.{k}" for k in config["fsdp_config"]),
    }
    lost, precision = found.without_counterpart
    assert lost.startswith("fsdp_config.fsdp_state_dict_type = 'LOCAL_STATE_DICT': no flat parameters")
    assert "model.float() for each parameter that requires a gradient" in precision
    assert found.state_dict == "sharded"
    policy = torch.distributed.fsdp.MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=BF16)
    assert found.mp_policy == policy
    assert "! fsdp_config.fsdp_state_dict_type" in str(found)


@pytest.mark.parametrize("reader", [accelerate, composer, deepspeed], ids=lambda reader: reader.NAME)
def test_each_key_that_is_known_cites_its_source(reader: Any) -> None:
    sections = [
        value for name, value in vars(reader).items() if name in ("FSDP", "ABOVE", "ZERO", "PRECISION")
    ]
    keys = [key for section in sections for key in section.values()]
    assert len(keys) > 20
    assert all(key.source.startswith("https://") for key in keys)


def test_every_field_of_accelerates_config_is_known() -> None:
    from accelerate.commands.config.config_args import ClusterConfig
    from accelerate.commands.to_fsdp2 import ARGUMENT_KEY_MAPPING

    assert set(ClusterConfig.__dataclass_fields__) - {"fsdp_config"} <= set(accelerate.ABOVE)
    assert set(ARGUMENT_KEY_MAPPING) <= set(accelerate.FSDP)


def test_what_accelerates_own_tool_drops_is_kept() -> None:
    from accelerate.commands.to_fsdp2 import convert_config_to_fsdp2

    for strategy, resharded in (("FULL_SHARD", True), ("SHARD_GRAD_OP", False)):
        config = of_accelerate(fsdp_sharding_strategy=strategy)
        theirs = convert_config_to_fsdp2({**config, "fsdp_config": dict(config["fsdp_config"])})
        assert translate(config).reshard_after_forward is resharded
        assert translate(theirs).reshard_after_forward is resharded

    hybrid = of_accelerate(fsdp_sharding_strategy="HYBRID_SHARD")
    assert translate(hybrid).shard_size == "host"
    assert "LOCAL_WORLD_SIZE" in translate(hybrid).code()
    assert translate(convert_config_to_fsdp2(hybrid)).shard_size is None  # the second dimension is gone
    unsharded = of_accelerate(fsdp_sharding_strategy="NO_SHARD")
    assert translate(unsharded).ddp
    assert not translate(convert_config_to_fsdp2(unsharded)).ddp  # theirs is sharded


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (of_composer(data_parallel_replicate_degree=2), "size = dist.get_world_size() // 2"),
        (of_composer(data_parallel_replicate_degree=-1, data_parallel_shard_degree=4), "size = 4"),
        (of_deepspeed(mics_shard_size=4), "size = 4"),
        (of_deepspeed(zero_hpz_partition_size=8), "reshard_after_forward=8"),
        (of_deepspeed(2), "reshard_after_forward=False"),
        (of_deepspeed(offload_param={"device": "cpu"}), "CPUOffloadPolicy()"),
        (of_deepspeed(above={"fp16": {"enabled": True}}), "reduce_dtype=torch.float16"),
        (of_accelerate("fp16"), "torch.amp.GradScaler"),
        (of_composer("amp_fp16"), "torch.amp.GradScaler"),
        (of_composer(auto_wrap=False), "return fully_shard(model"),
        (in_dimensions(dp_replicate=2, dp_shard=4), "size = 4"),
        (in_dimensions(dp_replicate=2, dp_shard=4), "assert dist.get_world_size() == 8  #"),
        (in_dimensions(dp_shard=2, cp=2, tp=2), "assert dist.get_world_size() == 8  #"),
        (in_dimensions(dp_replicate=2, dp_shard=2, tp=2), "size = 2"),
        (in_dimensions(dp_replicate=2, dp_shard=2, cp=3), "size = 6"),  # sharded over both
        (in_dimensions(dp_shard=8), "options = {}\n    names"),
    ],
)
def test_code_of(config: dict[str, Any], expected: str) -> None:
    code = translate(config).code()
    compile(code, "translated", "exec")
    assert expected in code


@pytest.mark.parametrize(
    ("config", "lost"),
    [
        (of_deepspeed(offload_param={"device": "nvme"}), "not to NVMe"),
        (of_deepspeed(offload_optimizer={"device": "cpu"}), "not alone"),
        (of_deepspeed(zero_quantized_weights=True), "does not quantize"),
        (of_deepspeed(overlap_comm="auto"), "Trainer fills it in"),
        (of_deepspeed(0, above={"bf16": {"enabled": True}}), "torch.autocast"),
        (of_deepspeed(0, above={"fp16": {"enabled": True}}), "torch.amp.GradScaler scales the loss"),
        (of_deepspeed(above={"optimizer": {"type": "OneBitAdam"}}), "compresses gradients to one bit"),
        (of_deepspeed(above={"optimizer": {"type": "Lamb", "params": {"lr": 1}}}), "no optimizer of torch"),
        (of_deepspeed(above={"scheduler": {"type": "WarmupLR"}}), "write it as a LambdaLR"),
        (of_deepspeed(above={"sparse_gradients": True}), "dense gradients alone"),
        (of_deepspeed(above={"data_types": {"grad_accum_dtype": "fp32"}}), "dtype of the sharded parameters"),
        (in_dimensions(dp_shard=2, tp=2), "parallelize_module"),
        (of_deepspeed(above={"tensor_parallel": {"autotp_size": 2}}), "parallelize_module"),
        (
            {"precision": "fp32", "fsdp_config": {}, "tp_config": {"tensor_parallel_degree": 2}},
            "takes a plan for parallelize_module",
        ),
        (of_deepspeed(offload_parm={}), "no key of DeepSpeed that is known here: is offload_param"),
        (of_deepspeed(offload_param={"to": 1}), "no key of DeepSpeed that is known here"),
        ({"precision": "fp32", "parallelism_config": {"fsdp": {}, "ep": {}}}, "no key of Composer"),
        (in_dimensions(dp_shard=2, ep=2), "no key of Accelerate that is known here"),
        (of_deepspeed(above={"optimizer": {"type": "SGD", "lr": 1}}), "no key of DeepSpeed"),
        (
            of_deepspeed(above={"fp16": {"enabled": True}}),
            "torch.amp.GradScaler scales the loss, in your loop",
        ),
        (of_accelerate("fp16"), "torch.amp.GradScaler scales the loss, in your loop"),
        (of_composer("amp_fp16"), "torch.amp.GradScaler scales the loss, in your loop"),
        (of_accelerate(fsdp_backward_prefetch="BACKWARD_POST"), "prefetches as BACKWARD_PRE"),
        (in_dimensions(dp_shard=2, cp=2), "context_parallel"),
        (in_dimensions(dp_shard=2, sp=2), "DeepSpeed's (Ulysses)"),
        ({"precision": "fp32", "fsdp_config": {}, "tp_config": {"strategy": "ffn"}}, "parallelize_module"),
        ({"precision": "fp32", "parallelism_config": {"fsdp": {}, "tp": {"a": 1}}}, "parallelize_module"),
        (of_accelerate("fp8"), "no fp8"),
        ({"fsdp_config": {}}, "add 'precision'"),
    ],
)
def test_what_has_no_counterpart_is_told(config: dict[str, Any], lost: str) -> None:
    (text,) = translate(config).without_counterpart
    assert lost in text


def test_files_are_read_and_frameworks_are_told(tmp_path: Path) -> None:
    def file(name: str, text: str) -> Translation:
        (tmp_path / name).write_text(text)
        return translate(tmp_path / name)

    assert file("a.yaml", yaml.safe_dump(of_accelerate())).framework == "Accelerate"
    assert file("b.yml", yaml.safe_dump({"fsdp_config": {"mixed_precision": "FULL"}})).framework == "Composer"
    assert file("c.json", json.dumps(of_deepspeed())).framework == "DeepSpeed"
    assert translate({"bf16": {"enabled": False}}, framework="deepspeed").ddp


@pytest.mark.parametrize(
    ("config", "framework", "said"),
    [
        (
            {"model": 1},
            None,
            r"framework: expected a config with the key .* found 'model'",
        ),
        (of_deepspeed(), "megatron", r"framework: expected one of 'accelerate', .* found 'megatron'"),
        (of_deepspeed(4), None, r"zero_optimization.stage: expected 0, 1, 2 or 3, found 4"),
        (of_deepspeed(2, zero_hpz_partition_size=8), None, r"hpz_partition_size: expected stage 3"),
        (
            of_accelerate(fsdp_offload_params="yes"),
            None,
            r"offload_params: expected true or false, .*'yes'",
        ),
        (of_accelerate(fsdp_sharding_strategy="FULL"), None, r"expected one of FULL_SHARD, .* found 'FULL'"),
        (
            {"distributed_type": "XLA"},
            None,
            r"distributed_type: expected 'FSDP', 'DEEPSPEED', .* found 'XLA'",
        ),
        (of_composer("amp_bf8"), None, r"precision: expected fp32, amp_bf16 or amp_fp16, found 'amp_bf8'"),
        ({"parallelism_config": {"tp": {}}}, None, r"parallelism_config: expected a section 'fsdp'"),
        ({"parallelism_config": {"fsdp": {}}, "fsdp_config": {}}, None, r"fsdp_config: .* found both"),
        (in_dimensions(dp_replicate=2), None, r"parallelism_config: expected dp_shard_size or cp_size above"),
        (in_dimensions(dp_shard=0), None, r"dp_shard_size: expected a whole number from 1 on, found 0"),
        (in_dimensions(dp_shard="2"), None, r"dp_shard_size: expected a whole number, found '2'"),
        (in_dimensions(ep=2), None, r"parallelism_config: expected dp_shard_size or cp_size above"),
        (of_deepspeed(above={"optimizer": "Adam"}), None, r"optimizer: expected a section with a type"),
        (of_deepspeed(above={"scheduler": {"type": "StepLR", "params": 1}}), None, r"params to be a section"),
    ],
)
def test_what_is_unknown_is_named_with_what_was_expected(
    config: dict[str, Any], framework: str | None, said: str
) -> None:
    with pytest.raises(TranslationError, match=said):
        translate(config, framework=framework)


def test_no_config_at_all_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="expected a dict of settings, found list"):
        translate([])  # type: ignore[arg-type]
    (tmp_path / "empty.yaml").write_text("")
    with pytest.raises(TranslationError, match=r"in empty.yaml: expected a dict of settings, found NoneType"):
        translate(tmp_path / "empty.yaml")
    with pytest.raises(ValueError, match=r"a.toml: expected a file .json, .yaml or .yml"):
        translate("a.toml")
    with pytest.raises(TranslationError, match=r"^\.: expected a file, found a folder"):  # its name is empty
        translate(".")
