"""DeepSpeed's JSON in FSDP2.

Source: https://www.deepspeed.ai/docs/config-json/
"""

from collections.abc import Mapping
from typing import Any

from fsdp_utils.migration import reading
from fsdp_utils.migration.reading import Key, Lost, Same, Words, fixed, if_on, is_on, read_section
from fsdp_utils.migration.translation import FSDP2, STATE_DICT, TITAN, Translation
from fsdp_utils.migration.values import TranslationError, shown

NAME = "DeepSpeed"
MICRO_BATCH = "train_micro_batch_size_per_gpu"
DOCS = "https://www.deepspeed.ai/docs/config-json/"
HF = "https://huggingface.co/docs/accelerate/v1.15.0/en/concept_guides/fsdp_and_deepspeed"
CLIP = "https://docs.pytorch.org/docs/2.13/generated/torch.nn.utils.clip_grad_norm_.html"
ENGINE = "https://github.com/deepspeedai/DeepSpeed/blob/b555aa532ac3577c4ec1ae74d2244e1e31a2a27e/deepspeed/runtime/engine.py"
TRAINER = "https://huggingface.co/docs/transformers/v5.13.0/deepspeed"
# classes of torch.optim and of torch.optim.lr_scheduler, which DeepSpeed takes by these names
OPTIMIZERS = {
    "Adadelta", "Adafactor", "Adagrad", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD",
}  # fmt: skip
SCHEDULERS = {
    "ChainedScheduler", "ConstantLR", "CosineAnnealingLR", "CosineAnnealingWarmRestarts", "CyclicLR",
    "ExponentialLR", "LinearLR", "MultiStepLR", "OneCycleLR", "PolynomialLR", "ReduceLROnPlateau", "StepLR",
}  # fmt: skip
OFFLOAD_KEYS = {
    "device", "nvme_path", "pin_memory", "buffer_count", "buffer_size", "max_in_cpu", "ratio", "fast_init",
    "pipeline_read", "pipeline_write", "super_offload", "cpuadam_cores_perc",
}  # fmt: skip


def is_mine(config: Mapping[str, Any]) -> bool:
    """Whether the config has DeepSpeed's section about ZeRO, or its batch sizes and nothing of the others."""
    if "zero_optimization" in config:
        return True
    others = {"distributed_type", "fsdp", "fsdp_config", "parallelism_config", "deepspeed"}
    return not others & set(config) and bool({"train_batch_size", MICRO_BATCH} & set(config))


def read(config: Mapping[str, Any]) -> Translation:
    """Translate it."""
    translation = Translation(NAME, ddp=True)  # stage 0 is DeepSpeed's default
    above = dict(config)
    zero = above.pop("zero_optimization", {})
    if isinstance(zero, bool):  # as in 2020: true is stage 1
        zero = {"stage": int(zero)}
    _section(zero, ZERO, translation, name="zero_optimization")
    in_fp32 = above.get("fp32_allreduce") is True  # the older name
    communication = above.get("communication_data_type", "fp32" if in_fp32 else "auto")
    enabled: list[str] = []
    for name in ("bf16", "bfloat16", "fp16"):
        section = above.pop(name, {})
        keys = {"enabled": Key(_precision(name, section, communication, enabled), FSDP2), **PRECISION}
        if isinstance(section, Mapping) and section.get("enabled", False) in (False, "false", "False"):
            keys = dict.fromkeys(keys, fixed(Same("nothing: it is off"), FSDP2))
        _section(section, keys, translation, name=name)
    _section(above, ABOVE, translation)
    return translation


def _section(section: Any, keys: Mapping[str, Key], translation: Translation, *, name: str = "") -> None:
    """As `read_section`, with the value "auto" for all but the stage."""
    if isinstance(section, Mapping):
        prefix = f"{name}." if name else ""
        for key, value in section.items():
            if value == "auto" and key in keys and key != "stage":
                words = f"transformers' Trainer fills it in. Give its value: given={{'{prefix}{key}': ...}}"
                keys = {**keys, key: fixed(Lost(words), TRAINER)}
    read_section(section, keys, translation, name=name, framework=NAME)


def _stage(value: Any, translation: Translation) -> Words:
    if value == "auto":
        raise TranslationError("expected 0, 1, 2 or 3, found 'auto'. Give it: given={'...stage': 3}")
    if reading.number(value) not in (0, 1, 2, 3):
        raise TranslationError(f"expected 0, 1, 2 or 3, found {value}")
    translation.ddp, translation.reshard_after_forward = value == 0, value == 3
    if value == 0:
        return Same("DistributedDataParallel: nothing is sharded")
    if value == 1:
        return reading.reshard(False, translation)
    if value == 2:
        return Same("reshard_after_forward=False, which also cuts the parameters between steps")
    return Same("reshard_after_forward=True")


def _hpz(value: Any, translation: Translation) -> Words:
    if reading.number(value) < 2:
        return Same("nothing: it is off")
    if translation.reshard_after_forward is not True:
        raise TranslationError(f"expected stage 3 beside it, found {value} with another stage")
    translation.reshard_after_forward = value
    return Same(f"reshard_after_forward={value}")


def _mics(value: Any, translation: Translation) -> Words:
    if reading.number(value) < 1:
        return Same("nothing: it is off")
    translation.shard_size = value
    return Same("a 2-D mesh (copies, ranks that share one)")


def _offload_param(value: Any, translation: Translation) -> Words:
    device = _device(value)
    if device != "NONE" and not (translation.ddp or translation.reshard_after_forward):
        return Same("nothing: DeepSpeed takes it with stage 3 alone")
    if device == "NVME":
        return Lost("FSDP2 offloads to host memory alone, not to NVMe")
    pinned = device == "NONE" or is_on(value.get("pin_memory", True))
    return reading.offload(device == "CPU", translation, pin_memory=pinned)


def _offload_optimizer(value: Any, translation: Translation) -> Words:
    device = _device(value)
    if device == "NVME":
        return Lost("FSDP2 offloads to host memory alone, not to NVMe")
    if device == "NONE":
        return Same("nothing: not offloaded")
    if translation.offload:
        return Same("CPUOffloadPolicy of offload_param: it holds the optimizer state too")
    return Lost("not alone: CPUOffloadPolicy moves parameters, gradients and optimizer state together")


def _to_cpu(value: Any) -> dict[str, str]:
    return {"device": "cpu" if is_on(value) else "none"}


def _device(value: Any) -> str:
    if value is False:
        return "NONE"
    if not isinstance(value, Mapping):
        raise TranslationError(f"expected a section with a device, found {shown(value)}")
    return reading.one_of(value.get("device", "cpu"), ("CPU", "NVME", "NONE"))


def _precision(name: str, section: Any, communication: Any, enabled: list[str]) -> Any:
    def read(value: Any, translation: Translation) -> Words:
        if not is_on(value):
            return Same("nothing: it is off")
        enabled.append(name)
        if len(enabled) > 1:
            raise TranslationError("expected one of bf16 and fp16, found both enabled")
        low = (section.get(f"{kind}_master_weights_and_grads") for kind in ("bf16", "fp16"))
        translation.masters = not any(str(on).lower() == "true" for on in low)
        reduce = reading.dtype(name if communication in ("auto", "none", None) else communication)
        return reading.precision(reading.dtype(name), reduce, translation)

    return read


def _communication(value: Any, translation: Translation) -> Words:
    if value is not None and (translation.param_dtype is None or translation.ddp):
        return Lost("without MixedPrecisionPolicy gradients are added up in the dtype of the weights")
    return Same("reduce_dtype of MixedPrecisionPolicy")


def _gather_16bit(value: Any, translation: Translation) -> Words:
    if not is_on(value):
        return Same("nothing: get_state_dict and torch.distributed.checkpoint.save, sharded")
    translation.state_dict = "full"
    return Same("get_model_state_dict with full_state_dict=True, cpu_offload=True; then cast what it returns")


def _loss_scale(value: Any, translation: Translation) -> Words:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TranslationError(f"expected a number, found {shown(value)}")
    if value == 0:
        return Same("nothing: torch.amp.GradScaler, too, adapts the scale")
    return Same(f"init_scale={value} of torch.amp.GradScaler, and a growth_interval that is never reached")


def _tensor_parallel(value: Any, translation: Translation) -> Words:
    size = value.get("autotp_size", 1) if isinstance(value, Mapping) else value
    return reading.tensor_parallel(1 if size == 0 else size, translation)


def _unless_off(words: str) -> Key:
    """A section, or a switch, of which something is to be said unless it is off."""

    def read(value: Any, translation: Translation) -> Words:
        off = value.get("enabled", True) is False if isinstance(value, Mapping) else value is False
        return Same("nothing: it is off") if off else Lost(words)

    return Key(read, DOCS)


def _accumulation(value: Any, translation: Translation) -> Words:
    if value == "auto":  # in Accelerate's file
        return Lost("the program fills it in. Give its value: given={'...gradient_accumulation_steps': 4}")
    if isinstance(value, str) and value.isdecimal() and len(value) < 10:  # Accelerate takes such a text
        value = int(value)
    if (count := reading.number(value)) < 2:
        return Same("nothing: one batch for each step")
    divided = f"divide each loss by {count}, unless it is divided by the tokens of the whole step"
    if translation.ddp:
        return Same(f"no_sync() around the first {count - 1} of {count} batches; {divided}")
    first = f"for the first {count - 1} of {count} batches"
    if translation.reshard_after_forward is False:
        both = "set_requires_gradient_sync(False) and set_reshard_after_backward(False)"
        return Same(f"{both} {first}, both True for the last; {divided}")
    return Same(f"set_requires_gradient_sync(False) {first}, True for the last; {divided}")


def _optimizer(value: Any, translation: Translation) -> Words:
    name, params = _type(value)
    if name.lower() in ("adam", "adamw"):
        # DeepSpeed's Adam decouples weight decay too, unless it is told not to
        coupled = name.lower() == "adam" and not is_on(params.get("adam_w_mode", True))
        return Same(f"torch.optim.{'Adam' if coupled else 'AdamW'}, built after shard_model")
    if name in OPTIMIZERS:
        return Same(f"torch.optim.{name}, built after shard_model")
    if name.lower() in ("onebitadam", "zerooneadam", "onebitlamb"):
        return Lost(
            "DeepSpeed's own: it compresses gradients to one bit per number, which fully_shard does not. "
            "Choose an optimizer of torch.optim, and tune its learning rate again"
        )
    return Lost("no optimizer of torch.optim does the same: choose one, and tune its learning rate again")


def _scheduler(value: Any, translation: Translation) -> Words:
    name, _ = _type(value)
    if name in SCHEDULERS:
        return Same(f"torch.optim.lr_scheduler.{name}")
    return Lost("torch.optim.lr_scheduler has none of this formula: write it as a LambdaLR")


def _type(value: Any) -> tuple[str, Mapping[str, Any]]:
    """The type that a section names, and its parameters."""
    if not isinstance(value, Mapping) or not isinstance(value.get("type"), str):
        raise TranslationError(f"expected a section with a type, found {shown(value)}")
    params = value.get("params", {})
    if not isinstance(params, Mapping):
        raise TranslationError(f"expected params to be a section, found {shown(params)}")
    return value["type"], params


INSIDE_NAMES = (
    "reduce_scatter allgather_partitions contiguous_gradients sub_group_size round_robin_gradients "
    "ignore_unused_parameters load_from_fp32_weights elastic_checkpoint log_trace_cache_warnings "
    "compute_grad_norm parameter_alignment memory_efficient_linear mics_hierarchical_params_gather "
    "use_multi_rank_bucket_allreduce stage3_use_all_reduce_for_fetch_params stage3_allgather_sequential "
    "stage3_partition_stream_chunk_size zeropp_loco_param legacy_stage1 pipeline_loading_checkpoint "
    "override_module_apply enable_sanity_checks save_muon_momentum_buffer_in_memory leaf_module"
)
OTHER_NAMES = (
    "prescale_gradients gradient_predivide_factor steps_per_print wall_clock_breakdown dump_state "
    "memory_breakdown zero_allow_untested_optimizer zero_force_ds_cpu_optimizer aio flops_profiler "
    "comms_logger comms_config tensorboard wandb comet csv_monitor monitor_config checkpoint elasticity "
    "autotuning nebula dataloader_drop_last vocabulary_size use_node_local_storage"
)
UNITS = fixed(Lost("a unit is gathered and freed as a whole: the choice of units decides"), FSDP2)
INSIDE = fixed(Lost("is about how DeepSpeed does it"), DOCS)
ZERO = {
    "stage": Key(_stage, TITAN),
    "zero_hpz_partition_size": Key(_hpz, TITAN),
    "mics_shard_size": Key(_mics, TITAN),
    "offload_param": Key(_offload_param, HF, inside=OFFLOAD_KEYS),
    "cpu_offload_param": Key(lambda value, t: _offload_param(_to_cpu(value), t), HF),  # an older name
    "offload_optimizer": Key(_offload_optimizer, HF, inside=OFFLOAD_KEYS),
    "cpu_offload": Key(lambda value, t: _offload_optimizer(_to_cpu(value), t), HF),
    "cpu_offload_use_pin_memory": fixed(Same("nothing by itself: see cpu_offload_param"), HF),
    "stage3_gather_16bit_weights_on_model_save": Key(_gather_16bit, STATE_DICT),
    "overlap_comm": fixed(Same("nothing: FSDP2 always prefetches and overlaps"), FSDP2),
    "stage3_prefetch_bucket_size": fixed(
        Same("set_modules_to_forward_prefetch and _backward_prefetch"), FSDP2
    ),
    "stage3_param_persistence_threshold": fixed(Lost("small parameters are sharded like all others"), FSDP2),
    **dict.fromkeys(["stage3_max_live_parameters", "stage3_max_reuse_distance"], UNITS),
    **dict.fromkeys(["stage3_model_persistence_threshold", "stage3_module_granularity_threshold"], UNITS),
    **dict.fromkeys(["reduce_bucket_size", "allgather_bucket_size"], UNITS),
    **dict.fromkeys(
        ["zero_quantized_weights", "zero_quantized_gradients", "zero_quantized_nontrainable_weights"],
        if_on(Lost("fully_shard does not quantize what it sends"), FSDP2),
    ),
    "zenflow": _unless_off("ZenFlow, which updates with the largest gradients first, is DeepSpeed's"),
    **dict.fromkeys(
        INSIDE_NAMES.split(),
        INSIDE,
    ),
}
ZERO["stage3_gather_fp16_weights_on_model_save"] = ZERO["stage3_gather_16bit_weights_on_model_save"]
# DeepSpeed takes these by both names
ZERO |= {name.removeprefix("stage3_"): key for name, key in ZERO.items() if name.startswith("stage3_")}
SCALER = "https://docs.pytorch.org/docs/2.13/amp.html"
PRECISION = {
    "auto_cast": if_on(Same("cast_forward_inputs of MixedPrecisionPolicy, on by default"), FSDP2),
    "loss_scale": Key(_loss_scale, SCALER),
    "initial_scale_power": fixed(Same("init_scale of torch.amp.GradScaler, 2 to that power"), SCALER),
    "loss_scale_window": fixed(Same("growth_interval of torch.amp.GradScaler"), SCALER),
    **dict.fromkeys(("hysteresis", "consecutive_hysteresis", "min_loss_scale"), INSIDE),
    **dict.fromkeys(("fused_mode", "immediate_grad_update", "check_grad_overflow"), INSIDE),
    **dict.fromkeys(
        ("fp16_master_weights_and_grads", "bf16_master_weights_and_grads", "bf16_optimizer_states"),
        if_on(Lost("FSDP2 keeps the model's own dtype: build the model in that dtype"), FSDP2),
    ),
}
ELSEWHERE = "is about the model or its data, and DeepSpeed's own"
NOT_HERE = {
    "amp": "apex.amp: mp_policy=MixedPrecisionPolicy(...) or torch.autocast around the forward pass",
    "torch_autocast": "torch.autocast around the forward pass",
    "sequence_parallel_size": f"{reading.NOT_IN_CODE}Ulysses is DeepSpeed's",
    "seq_parallel_communication_data_type": "Ulysses is DeepSpeed's",
    "pipeline": "stages of a pipeline are no part of fully_shard: torch.distributed.pipelining",
    "hybrid_engine": "is about generating with the model, and DeepSpeed's own",
    "disable_allgather": "is about how DeepSpeed does it",
    "graph_harvesting": "is about how DeepSpeed does it",
    **dict.fromkeys(
        (
            "sparse_attention", "progressive_layer_drop", "compression_training", "data_efficiency",
            "curriculum_learning", "quantize_training", "eigenvalue",
        ),
        ELSEWHERE,
    ),
}  # fmt: skip
ABOVE = {
    "train_batch_size": fixed(Same("batch_size of the DataLoader, times the ranks"), DOCS),
    "train_micro_batch_size_per_gpu": fixed(Same("batch_size of the DataLoader"), DOCS),
    "gradient_accumulation_steps": Key(_accumulation, FSDP2),
    "gradient_clipping": fixed(Same("torch.nn.utils.clip_grad_norm_"), CLIP),
    "communication_data_type": Key(_communication, FSDP2),
    "fp32_allreduce": if_on(Same("reduce_dtype of MixedPrecisionPolicy"), FSDP2),
    "optimizer": Key(_optimizer, ENGINE, inside=("type", "params", "legacy_fusion")),
    "scheduler": Key(_scheduler, DOCS, inside=("type", "params")),
    "tensor_parallel": Key(_tensor_parallel, DOCS),
    **{name: _unless_off(words) for name, words in NOT_HERE.items()},
    "compile": fixed(Same("torch.compile: not a setting of sharding"), DOCS),
    "sparse_gradients": if_on(Lost("fully_shard reduces dense gradients alone"), DOCS),
    "data_types": fixed(Lost("gradients are kept in the dtype of the sharded parameters"), FSDP2),
    "activation_checkpointing": fixed(
        Lost("configures deepspeed.checkpointing; in PyTorch, checkpoint_wrapper around each block"), DOCS
    ),
    **dict.fromkeys(
        OTHER_NAMES.split(),
        fixed(Same("nothing: not a setting of sharding"), DOCS),
    ),
}
