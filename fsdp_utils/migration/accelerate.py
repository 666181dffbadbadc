"""Accelerate's config file in FSDP2.

Source: https://huggingface.co/docs/accelerate/v1.15.0/en/usage_guides/fsdp
"""

from collections.abc import Mapping
from typing import Any

from fsdp_utils.migration import settings
from fsdp_utils.migration.keys import Key, Lost, Same, Words, dtype, fixed, if_on, is_on, one_of, read_section
from fsdp_utils.migration.translation import FSDP2, GUIDE, STATE_DICT, TITAN, Translation

NAME = "Accelerate"
DOCS = "https://huggingface.co/docs/accelerate/v1.15.0/en/concept_guides/fsdp1_vs_fsdp2"
PLUGIN = "https://huggingface.co/docs/accelerate/v1.15.0/en/package_reference/fsdp"
LAUNCH = "https://huggingface.co/docs/accelerate/v1.15.0/en/package_reference/cli"


def is_mine(config: Mapping[str, Any]) -> bool:
    """Is this the file that `accelerate config` writes?"""
    return "distributed_type" in config


def read(config: Mapping[str, Any]) -> Translation:
    """Translate it."""
    above = dict(config)
    fsdp = above.pop("fsdp_config", {})
    # Accelerate's defaults: one unit; a full state dict with FSDP1, a sharded one with FSDP2
    full = not (isinstance(fsdp, Mapping) and fsdp.get("fsdp_version") == 2)
    translation = Translation(NAME, blocks=(), state_dict="full" if full else "sharded")
    read_section(fsdp, FSDP, translation, name="fsdp_config", framework=NAME)
    read_section(above, ABOVE, translation, framework=NAME)
    return translation


def _distributed_type(value: Any, translation: Translation) -> Words:
    if value == "DEEPSPEED":
        raise ValueError("expected 'FSDP', found 'DEEPSPEED'. Translate DeepSpeed's own JSON instead")
    if value != "FSDP":
        raise ValueError(f"expected 'FSDP', found {value!r}")
    return Same("fully_shard")


def _mixed_precision(value: Any, translation: Translation) -> Words:
    if value == "fp8":
        return Lost("fully_shard has no fp8 of its own")
    return settings.precision(dtype(value), dtype(value), translation)


def _reshard(value: Any, translation: Translation) -> Words:
    if str(value).lower() not in ("true", "false"):
        return settings.strategy(value, translation)  # with FSDP1 this key, too, holds a strategy
    translation.reshard_after_forward = is_on(value)
    return Same(f"reshard_after_forward={is_on(value)}")


def _wrap(value: Any, translation: Translation) -> Words:
    policy = one_of(value, ("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP"))
    if policy == "NO_WRAP":
        return Same("fully_shard(model) alone: one unit")
    translation.blocks = None
    if policy == "SIZE_BASED_WRAP":
        return Lost("no policy by size: here each transformer block becomes a unit")
    return Same("fully_shard on each block, then on the model")


def _classes(value: Any, translation: Translation) -> Words:
    if not isinstance(value, str) or not all(name.strip() for name in value.split(",")):
        raise ValueError(f"expected names of classes with commas between them, found {value!r}")
    if translation.blocks == ():
        return Same("nothing: without TRANSFORMER_BASED_WRAP Accelerate does not look at it")
    translation.blocks = tuple(name.strip() for name in value.split(","))
    return Same(f"fully_shard on each {', '.join(translation.blocks)}")


RANK0 = Same("meta device, then set_model_state_dict with full_state_dict=True, broadcast_from_rank0=True")
SAVE_ON_CPU = Lost("not part of fully_shard: torch.autograd.graph.save_on_cpu in the block's forward")
FSDP = {
    "fsdp_version": fixed(Same("fully_shard is version 2"), DOCS),
    "fsdp_sharding_strategy": Key(settings.strategy, TITAN),
    "fsdp_reshard_after_forward": Key(_reshard, DOCS),
    "fsdp_auto_wrap_policy": Key(_wrap, TITAN),
    "fsdp_transformer_layer_cls_to_wrap": Key(_classes, GUIDE),
    "fsdp_min_num_params": fixed(Lost("no policy by size: name the blocks"), TITAN),
    "fsdp_backward_prefetch": fixed(Same("nothing: always as BACKWARD_PRE"), DOCS),
    "fsdp_backward_prefetch_policy": fixed(Same("nothing: always as BACKWARD_PRE"), DOCS),  # its name in 2023
    "fsdp_forward_prefetch": if_on(Same("set_modules_to_forward_prefetch, on each block"), FSDP2),
    "fsdp_offload_params": Key(lambda value, t: settings.offload(is_on(value), t), FSDP2),
    "fsdp_state_dict_type": Key(settings.state_dict, STATE_DICT),
    "fsdp_cpu_ram_efficient_loading": if_on(RANK0, GUIDE),
    "fsdp_sync_module_states": if_on(RANK0, GUIDE),
    "fsdp_use_orig_params": fixed(Same("nothing: parameters keep their names and shapes"), DOCS),
    "fsdp_activation_checkpointing": Key(settings.checkpointing, PLUGIN),
    "fsdp_activation_checkpointing_offload": if_on(SAVE_ON_CPU, PLUGIN),
    "fsdp_ignored_modules": fixed(Same("ignored_params=..., a set of parameters; from torch 2.7 on"), FSDP2),
    "fsdp_limit_all_gathers": fixed(Same("nothing: FSDP2 needs no such limit"), TITAN),
}
LAUNCHER = "num_processes num_machines machine_rank main_process_ip main_process_port rdzv_backend gpu_ids"
OTHERS = (
    "compute_environment debug downcast_bf16 dynamo_config enable_cpu_affinity fp8_config same_network "
    "main_training_function use_cpu mpirun_config parallelism_config megatron_lm_config deepspeed_config "
    "tpu_name tpu_zone tpu_use_cluster tpu_use_sudo tpu_env tpu_vm commands command_file"
)
ABOVE = {
    "distributed_type": Key(_distributed_type, LAUNCH),
    "mixed_precision": Key(_mixed_precision, FSDP2),
    **dict.fromkeys(LAUNCHER.split(), fixed(Same("an option of torchrun"), LAUNCH)),
    **dict.fromkeys(OTHERS.split(), fixed(Same("nothing: not a setting of FSDP"), LAUNCH)),
}
