"""What becomes of each key: which are named as lost, and from which value on a setting is a setting."""

from typing import Any

import pytest

from fsdp_utils.migration import Translation, TranslationError, accelerate, composer, deepspeed, translate

# a value for each key that is not a switch; the switches are set to True, then to False
VALUES: dict[str, Any] = {
    "distributed_type": "FSDP",
    "mixed_precision": "bf16",
    "fsdp_sharding_strategy": "FULL_SHARD",
    "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    "fsdp_transformer_layer_cls_to_wrap": "Block",
    "fsdp_state_dict_type": "FULL_STATE_DICT",
    "fsdp_backward_prefetch": "BACKWARD_PRE",
    "fsdp_backward_prefetch_policy": "BACKWARD_PRE",
    "backward_prefetch": "BACKWARD_PRE",
    "parallelism_config": {},
    "data_parallel_shard_degree": 4,
    "data_parallel_replicate_degree": 2,
    "sharding_strategy": "FULL_SHARD",
    "state_dict_type": "full",
    "stage": 3,
    "tensor_parallel": {"autotp_size": 2},
    "loss_scale": 0,
    "zero_hpz_partition_size": 4,
    "mics_shard_size": 4,
    "offload_param": {"device": "cpu"},
    "offload_optimizer": {"device": "cpu"},
    "communication_data_type": "fp32",
    "gradient_accumulation_steps": 2,
    "optimizer": {"type": "AdamW"},
    "scheduler": {"type": "StepLR"},
}
COMPOSERS = {**VALUES, "mixed_precision": "DEFAULT"}


def rows(on: bool) -> dict[str, Translation]:
    """All keys that are known, of each framework, with the switches on or off."""

    def section(keys: Any, values: dict[str, Any] = VALUES, **others: Any) -> dict[str, Any]:
        return {key: others.get(key, values.get(key, on)) for key in keys}

    sizes = {name: 2 for name in accelerate.PARALLELISM if name.endswith("_size")}
    of_accelerate = {
        **section(accelerate.ABOVE),
        "fsdp_config": section(accelerate.FSDP),
        "parallelism_config": section(accelerate.PARALLELISM, sizes),
    }
    of_deepspeed = {
        **section(deepspeed.ABOVE),
        "zero_optimization": section(deepspeed.ZERO),
        "bf16": {"enabled": True, **section(deepspeed.PRECISION)},
    }
    of_composer = {"precision": "amp_bf16", "fsdp_config": section(composer.FSDP, COMPOSERS)}
    return {
        "accelerate": translate(of_accelerate),
        "composer": translate(of_composer),
        "deepspeed": translate(of_deepspeed),
    }


def lost(found: Translation) -> set[str]:
    return {row.key.rpartition(".")[2].removeprefix("parallelism_config_") for row in found.rows} & {
        text.split(" = ")[0].rpartition(".")[2].removeprefix("parallelism_config_")
        for text in found.without_counterpart
    }


ALWAYS_LOST = {
    "accelerate": {"fsdp_min_num_params", "mixed_precision", "tp_size", "cp_size", "sp_size"},
    "composer": {"process_group"},
    "deepspeed": {
        "stage3_param_persistence_threshold", "stage3_max_live_parameters", "stage3_max_reuse_distance",
        "stage3_model_persistence_threshold", "stage3_module_granularity_threshold", "reduce_bucket_size",
        "allgather_bucket_size", "reduce_scatter", "allgather_partitions", "contiguous_gradients",
        "sub_group_size", "round_robin_gradients", "ignore_unused_parameters", "load_from_fp32_weights",
        "elastic_checkpoint", "log_trace_cache_warnings", "compute_grad_norm", "parameter_alignment",
        "memory_efficient_linear", "mics_hierarchical_params_gather", "hysteresis", "consecutive_hysteresis",
        "min_loss_scale", "activation_checkpointing", "data_types", "tensor_parallel", "fused_mode",
        "immediate_grad_update", "check_grad_overflow", "zeropp_loco_param", "enable_sanity_checks",
        "legacy_stage1", "pipeline_loading_checkpoint", "leaf_module", "save_muon_momentum_buffer_in_memory",
        "use_multi_rank_bucket_allreduce", "override_module_apply", "stage3_use_all_reduce_for_fetch_params",
        "stage3_partition_stream_chunk_size", "stage3_allgather_sequential",
        # without "stage3_": the same
        "param_persistence_threshold", "max_live_parameters", "max_reuse_distance", "allgather_sequential",
        "model_persistence_threshold", "module_granularity_threshold", "use_all_reduce_for_fetch_params",
        "partition_stream_chunk_size",
    },
}  # fmt: skip
LOST_IF_ON = {
    "accelerate": {"fsdp_activation_checkpointing_offload"},
    "composer": {
        "activation_checkpointing_reentrant", "activation_cpu_offload", "keep_low_precision_grads",
        "te_checkpoint_wrapper", "te_shard_fp8_weight",
    },
    "deepspeed": {
        "zero_quantized_weights", "zero_quantized_gradients", "zero_quantized_nontrainable_weights",
        "fp16_master_weights_and_grads", "bf16_master_weights_and_grads", "bf16_optimizer_states",
        "sparse_gradients", "disable_allgather", "torch_autocast", "zenflow", "compression_training",
        "seq_parallel_communication_data_type", "data_efficiency", "amp", "sequence_parallel_size",
        "pipeline", "graph_harvesting", "eigenvalue", "hybrid_engine", "sparse_attention",
        "quantize_training", "curriculum_learning", "progressive_layer_drop",
    },
}  # fmt: skip
# bf16 has float32 weights unless bf16_master_weights_and_grads is on
LOST_IF_OFF = {"deepspeed": {"enabled"}}


def test_these_keys_are_named_as_lost_and_no_others() -> None:
    switched_on, switched_off = rows(True), rows(False)
    for framework in ALWAYS_LOST:
        assert lost(switched_on[framework]) == ALWAYS_LOST[framework] | LOST_IF_ON[framework]
        assert lost(switched_off[framework]) == ALWAYS_LOST[framework] | LOST_IF_OFF.get(framework, set())


# ---- from which value on


def composers(**fsdp: Any) -> Translation:
    return translate({"precision": "amp_bf16", "fsdp_config": fsdp})


def deepspeeds(**zero: Any) -> Translation:
    return translate({"zero_optimization": {"stage": 3, **zero}})


@pytest.mark.parametrize(("value", "found"), [(-1, None), (0, None), (1, 1), (2, 2)])
def test_ranks_that_share_one_copy(value: int, found: int | None) -> None:
    assert composers(data_parallel_shard_degree=value).shard_size == found
    assert deepspeeds(mics_shard_size=value).shard_size == found


@pytest.mark.parametrize(("value", "found"), [(None, None), (0, None), (1, None), (2, 2)])
def test_copies(value: int | None, found: int | None) -> None:
    assert composers(data_parallel_replicate_degree=value).copies == found


@pytest.mark.parametrize(("value", "found"), [(-1, True), (1, True), (2, 2)])
def test_the_secondary_partition(value: int, found: int | bool) -> None:
    assert deepspeeds(zero_hpz_partition_size=value).reshard_after_forward is found


def test_sizes_of_one_are_no_dimensions() -> None:
    sizes = {"dp_shard": 4, "dp_replicate": 2, "tp": 1, "cp": 1, "sp": 1}
    named = {f"parallelism_config_{name}_size": size for name, size in sizes.items()}
    found = translate({"distributed_type": "FSDP", "parallelism_config": named})
    assert (found.copies, found.shard_size) == (2, 4)
    assert found.without_counterpart == []


def test_gradients_are_accumulated_from_two_batches_on() -> None:
    def words(value: int | str) -> str:
        found = translate({"zero_optimization": {"stage": 3}, "gradient_accumulation_steps": value})
        return next(row.fsdp2 for row in found.rows if row.key == "gradient_accumulation_steps")

    assert words(1) == "nothing: one batch for each step"
    assert words(2).startswith("set_requires_gradient_sync(False) for the first 1 of 2 batches, True for the")
    assert "divide each loss by 2" in words(2)  # else the gradients are twice as large
    assert words("2") == words(2)
    for config in (  # the value that Accelerate writes itself, in either place
        {"distributed_type": "DEEPSPEED", "deepspeed_config": {"gradient_accumulation_steps": "auto"}},
        {"distributed_type": "FSDP", "gradient_accumulation_steps": "auto"},
    ):
        assert "gradient_accumulation_steps = 'auto'" in translate(config).without_counterpart[0]


def test_activation_checkpointing_is_an_argument_of_the_trainer_too() -> None:
    for name in ("activation_checkpointing", "gradient_checkpointing"):
        found = translate({"fsdp": True, name: True, f"{name}_kwargs": {"every_n_layers": 2}})
        assert "checkpoint_wrapper(block)" in found.code()
        assert found.without_counterpart[0].startswith(f"{name}_kwargs = ")
        every = translate({"fsdp": True, name: True, f"{name}_kwargs": {"use_reentrant": False}})
        assert every.without_counterpart == []


def test_what_is_offloaded() -> None:
    pinned = deepspeeds(offload_param={})  # to the CPU, and pinned, by default
    assert (pinned.offload, pinned.pin_memory) == (True, True)
    assert not deepspeeds(offload_param={"device": "cpu", "pin_memory": False}).pin_memory
    assert not deepspeeds(offload_param={"device": "none"}).offload
    both = deepspeeds(offload_param={"device": "cpu"}, offload_optimizer={"device": "cpu"})
    assert both.without_counterpart == []
    assert deepspeeds(offload_optimizer={"device": "none"}).without_counterpart == []
    assert "not to NVMe" in deepspeeds(offload_optimizer={"device": "nvme"}).without_counterpart[0]
    assert composers(cpu_offload=True).offload
    assert not composers(cpu_offload=False).offload
    second = {"stage": 2, "offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}}
    found = translate({"zero_optimization": second})  # DeepSpeed offloads parameters with stage 3 alone
    assert not found.offload
    assert "not alone" in found.without_counterpart[0]
    unsharded = translate({"zero_optimization": {"stage": 0, "offload_param": {"device": "cpu"}}})
    assert not unsharded.offload
    assert "does not offload" in unsharded.without_counterpart[0]


def test_the_file_that_is_saved() -> None:
    assert deepspeeds().state_dict == "sharded"
    assert deepspeeds(stage3_gather_16bit_weights_on_model_save=False).state_dict == "sharded"
    assert deepspeeds(stage3_gather_16bit_weights_on_model_save=True).state_dict == "full"
    assert composers().state_dict == "full"
    assert composers(state_dict_type="sharded").state_dict == "sharded"
    versions = {2: "sharded", 1: "full"}
    for version, kind in versions.items():
        config = {"distributed_type": "FSDP", "fsdp_config": {"fsdp_version": version}}
        assert translate(config).state_dict == kind


def test_a_section_that_is_empty_shards_nothing() -> None:
    assert translate({"precision": "amp_bf16", "fsdp_config": None}).ddp
    numbered = {"distributed_type": "FSDP", "fsdp_config": {"fsdp_state_dict_type": 3}}
    assert translate(numbered).state_dict == "sharded"


def test_units() -> None:
    def wrapped(**fsdp: Any) -> Translation:
        return translate({"distributed_type": "FSDP", "fsdp_config": fsdp})

    named = {"fsdp_transformer_layer_cls_to_wrap": "Block"}
    assert wrapped().blocks == ()
    assert wrapped(fsdp_auto_wrap_policy="NO_WRAP", **named).blocks == ()
    assert wrapped(fsdp_auto_wrap_policy="NO_WRAP", **named).without_counterpart == []
    assert wrapped(fsdp_auto_wrap_policy="TRANSFORMER_BASED_WRAP").blocks is None
    assert wrapped(fsdp_auto_wrap_policy="TRANSFORMER_BASED_WRAP", **named).blocks == ("Block",)
    by_size = wrapped(fsdp_auto_wrap_policy="SIZE_BASED_WRAP")
    assert by_size.blocks is None
    assert "no policy by size" in by_size.without_counterpart[0]
    assert composers(auto_wrap=True).blocks is None
    assert composers(auto_wrap=False).blocks == ()
    assert composers(activation_checkpointing=True).checkpointing
    assert not composers(activation_checkpointing=False).checkpointing
    auto_wrap = next(row for row in composers(auto_wrap=False).rows if row.key.endswith("auto_wrap"))
    assert auto_wrap.fsdp2 == "fully_shard(model) alone"


def test_precision() -> None:
    def dtypes(found: Translation) -> tuple[str | None, str | None]:
        return found.param_dtype, found.reduce_dtype

    assert dtypes(composers(mixed_precision="FULL")) == (None, None)
    assert dtypes(composers(mixed_precision="PURE")) == ("bfloat16", "bfloat16")
    assert dtypes(composers(mixed_precision="DEFAULT")) == ("bfloat16", "float32")
    assert dtypes(composers(mixed_precision={"param_dtype": "bf16"})) == ("bfloat16", "bfloat16")
    assert dtypes(composers(mixed_precision={"reduce_dtype": "bf16"})) == ("float32", "bfloat16")
    assert dtypes(composers(mixed_precision={"param_dtype": "fp16", "reduce_dtype": "fp32"})) == (
        "float16",
        "float32",
    )
    half = {"zero_optimization": {"stage": 3}, "bf16": {"enabled": True}}
    assert dtypes(translate(half)) == ("bfloat16", "bfloat16")
    assert dtypes(translate({**half, "communication_data_type": "fp32"})) == ("bfloat16", "float32")
    assert dtypes(translate({**half, "bf16": {"enabled": False}})) == (None, None)
    without = translate({"zero_optimization": {"stage": 3}, "communication_data_type": "fp32"})
    assert "without MixedPrecisionPolicy" in without.without_counterpart[0]


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (
            {"distributed_type": "FSDP", "fsdp_config": 3},
            "fsdp_config: expected a section with keys, found 3",
        ),
        (
            {"distributed_type": "DEEPSPEED", "deepspeed_config": {"deepspeed_config_file": "ds.json"}},
            "deepspeed_config_file: expected the settings themselves, .* Translate that file",
        ),
        (
            {"zero_optimization": {}, "bf16": {"enabled": True}, "fp16": {"enabled": True}},
            "found both enabled",
        ),
        ({"zero_optimization": {"offload_param": "cpu"}}, "expected a section with a device, found 'cpu'"),
        ({"fsdp_config": {"data_parallel_replicate_degree": -1}}, "one of the two can be left open"),
    ],
)
def test_what_does_not_go_is_said(config: dict[str, Any], said: str) -> None:
    with pytest.raises(TranslationError, match=said):
        translate(config)


def test_what_is_off_or_needs_nothing_is_not_lost() -> None:
    for found in (
        composers(data_parallel_shard_degree=-1),
        composers(data_parallel_shard_degree=4, data_parallel_replicate_degree=-1),
        composers(state_dict_type="sharded"),
        deepspeeds(zero_hpz_partition_size=1, mics_shard_size=-1),
        translate({"zero_optimization": {"stage": 2}, "bf16": {"enabled": False}}),
        translate({"precision": "fp32", "parallelism_config": {"fsdp": {}, "tp": {}}}),
        translate({"precision": "fp32", "fsdp_config": {}, "tp_config": None}),
    ):
        assert found.without_counterpart == []


def test_words_of_settings_with_several_values() -> None:
    def words(found: Translation, key: str) -> str:
        return next(row.fsdp2 for row in found.rows if row.key.endswith(key))

    assert "full_state_dict=True" in words(composers(state_dict_type="full"), "state_dict_type")
    assert "checkpoint.save" in words(composers(state_dict_type="sharded"), "state_dict_type")
    assert "also cuts the parameters" in words(deepspeeds(stage=2), "stage")
    assert words(deepspeeds(), "stage") == "reshard_after_forward=True"
    off = composers(backward_prefetch="NO_PREFETCH")
    assert words(off, "prefetch").startswith("unit.set_modules_to_backward_prefetch([unit]) for each unit")
    assert off.without_counterpart == []
    as_text = {"distributed_type": "FSDP", "fsdp_config": {"fsdp_offload_params": "False"}}
    assert not translate(as_text).offload
    as_text["fsdp_config"] = {"fsdp_offload_params": "TRUE"}
    assert translate(as_text).offload
