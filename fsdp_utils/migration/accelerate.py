"""Accelerate's config file in FSDP2.

Source: https://huggingface.co/docs/accelerate/v1.15.0/en/usage_guides/fsdp
"""

from collections.abc import Mapping
from typing import Any

from fsdp_utils.migration import reading
from fsdp_utils.migration.reading import Key, Lost, Same, Words, fixed, if_on, is_on, read_section
from fsdp_utils.migration.translation import FSDP2, GUIDE, STATE_DICT, TITAN, Translation
from fsdp_utils.migration.values import TranslationError, shown

NAME = "Accelerate"
DOCS = "https://huggingface.co/docs/accelerate/v1.15.0/en/concept_guides/fsdp1_vs_fsdp2"
PLUGIN = "https://huggingface.co/docs/accelerate/v1.15.0/en/package_reference/fsdp"
MESH = "https://github.com/huggingface/accelerate/blob/v1.15.0/src/accelerate/parallelism_config.py"
LAUNCH = "https://huggingface.co/docs/accelerate/v1.15.0/en/package_reference/cli"


def is_mine(config: Mapping[str, Any]) -> bool:
    """Whether this is the file that `accelerate config` writes."""
    return "distributed_type" in config


def read(config: Mapping[str, Any]) -> Translation:
    """Translate it."""
    above = dict(config)
    fsdp = above.pop("fsdp_config", {})
    # Accelerate's defaults: one unit; a full state dict with FSDP1, a sharded one with FSDP2
    full = not (isinstance(fsdp, Mapping) and fsdp.get("fsdp_version") == 2)
    translation = Translation(NAME, blocks=(), state_dict="full" if full else "sharded")
    read_section(fsdp, FSDP, translation, name="fsdp_config", framework=NAME)
    if above.get("parallelism_config"):
        _parallelism(above.pop("parallelism_config"), translation)
    read_section(above, ABOVE, translation, framework=NAME)
    return translation


def _distributed_type(value: Any, translation: Translation) -> Words:
    if value == "DEEPSPEED":
        raise TranslationError("expected 'FSDP', found 'DEEPSPEED'. Translate DeepSpeed's own JSON instead")
    if value != "FSDP":
        raise TranslationError(f"expected 'FSDP', found {shown(value)}")
    return Same("fully_shard")


def _mixed_precision(value: Any, translation: Translation) -> Words:
    if value == "fp8":
        return Lost("fully_shard has no fp8 of its own")
    return reading.precision(reading.dtype(value), reading.dtype(value), translation)


def _parallelism(section: Any, translation: Translation) -> None:
    """The sizes of Accelerate's mesh: FSDP's own dimensions are translated, the others named as lost."""
    read_section(section, PARALLELISM, translation, name="parallelism_config", framework=NAME)
    sizes = {name: section.get(f"parallelism_config_{name}_size", 1) for name in SIZES}
    shard_size = sizes["dp_shard"] * sizes["cp"]  # over these two together Accelerate shards
    if shard_size == 1:
        raise TranslationError(
            "parallelism_config: expected dp_shard_size or cp_size above 1, found 1. Accelerate refuses it "
            "too: FSDP has no ranks to shard over"
        )
    if sizes["dp_replicate"] > 1:
        translation.shard_size, translation.copies = shard_size, sizes["dp_replicate"]
    else:
        translation.shard_size = None  # over all ranks


def _size(words: Words) -> Key:
    """A size of the mesh, of which something is to be said only where it is above 1."""
    alone = Same("nothing: 1 is no dimension")
    return Key(lambda value, translation: words if reading.at_least_one(value) > 1 else alone, MESH)


def _reshard(value: Any, translation: Translation) -> Words:
    if str(value).lower() not in ("true", "false"):
        return reading.strategy(value, translation)  # with FSDP1 this key, too, holds a strategy
    translation.reshard_after_forward = is_on(value)
    return Same(f"reshard_after_forward={is_on(value)}")


def _wrap(value: Any, translation: Translation) -> Words:
    policy = reading.one_of(value, ("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP"))
    if policy == "NO_WRAP":
        return Same("fully_shard(model) alone: one unit")
    translation.blocks = None
    if policy == "SIZE_BASED_WRAP":
        return Lost("no policy by size: here each transformer block becomes a unit")
    return Same("fully_shard on each block, then on the model")


def _classes(value: Any, translation: Translation) -> Words:
    # identifiers, and nothing else: the names go into the code that is written
    if not isinstance(value, str) or not all(name.strip().isidentifier() for name in value.split(",")):
        raise TranslationError(f"expected names of classes with commas between them, found {shown(value)}")
    if translation.blocks == ():
        return Same("nothing: without TRANSFORMER_BASED_WRAP Accelerate does not look at it")
    translation.blocks = tuple(name.strip() for name in value.split(","))
    return Same(f"fully_shard on each {', '.join(translation.blocks)}")


RANK0 = Same("meta device, then set_model_state_dict with full_state_dict=True, broadcast_from_rank0=True")
SAVE_ON_CPU = Lost("not part of fully_shard: torch.autograd.graph.save_on_cpu in the block's forward")
FSDP = {
    "fsdp_version": fixed(Same("fully_shard is version 2"), DOCS),
    "fsdp_sharding_strategy": Key(reading.strategy, TITAN),
    "fsdp_reshard_after_forward": Key(_reshard, DOCS),
    "fsdp_auto_wrap_policy": Key(_wrap, TITAN),
    "fsdp_transformer_layer_cls_to_wrap": Key(_classes, GUIDE),
    "fsdp_min_num_params": fixed(Lost("no policy by size: name the blocks"), TITAN),
    "fsdp_backward_prefetch": fixed(Same("nothing: by default as BACKWARD_PRE"), DOCS),
    # its name in 2023
    "fsdp_backward_prefetch_policy": fixed(Same("nothing: by default as BACKWARD_PRE"), DOCS),
    "fsdp_forward_prefetch": if_on(Same("set_modules_to_forward_prefetch, on each block"), FSDP2),
    "fsdp_offload_params": Key(lambda value, t: reading.offload(is_on(value), t), FSDP2),
    "fsdp_state_dict_type": Key(reading.state_dict, STATE_DICT),
    "fsdp_cpu_ram_efficient_loading": if_on(RANK0, GUIDE),
    "fsdp_sync_module_states": if_on(RANK0, GUIDE),
    "fsdp_use_orig_params": fixed(Same("nothing: parameters keep their names and shapes"), DOCS),
    "fsdp_activation_checkpointing": Key(reading.checkpointing, PLUGIN),
    "fsdp_activation_checkpointing_offload": if_on(SAVE_ON_CPU, PLUGIN),
    "fsdp_ignored_modules": fixed(Same("ignored_params=..., a set of parameters; from torch 2.7 on"), FSDP2),
    "fsdp_limit_all_gathers": fixed(Same("nothing: FSDP2 needs no such limit"), TITAN),
}
SIZES = ("dp_replicate", "dp_shard", "tp", "cp", "sp")
OTHER_DIMENSION = "not part of fully_shard, and left out of the code: all ranks share the data. "
PARALLELISM = {
    "parallelism_config_dp_replicate_size": _size(Same("the first dimension of a 2-D mesh: copies")),
    "parallelism_config_dp_shard_size": _size(Same("the ranks that share one copy")),
    "parallelism_config_tp_size": _size(
        Lost(f"{OTHER_DIMENSION}parallelize_module over one more dimension of the mesh, before fully_shard")
    ),
    "parallelism_config_cp_size": _size(
        Lost(f"{OTHER_DIMENSION}context_parallel of torch.distributed.tensor.experimental, around the step")
    ),
    "parallelism_config_sp_size": _size(Lost(f"{OTHER_DIMENSION}It is DeepSpeed's (Ulysses)")),
    **dict.fromkeys(
        ("parallelism_config_cp_backend", "parallelism_config_cp_comm_strategy"),
        fixed(Same("nothing by itself: see parallelism_config_cp_size"), MESH),
    ),
    **dict.fromkeys(
        (
            "parallelism_config_sp_backend",
            "parallelism_config_sp_seq_length",
            "parallelism_config_sp_seq_length_is_variable",
            "parallelism_config_sp_attn_implementation",
        ),
        fixed(Same("nothing by itself: see parallelism_config_sp_size"), MESH),
    ),
}
LAUNCHER = "num_processes num_machines machine_rank main_process_ip main_process_port rdzv_backend gpu_ids"
OTHERS = (
    "compute_environment debug downcast_bf16 enable_cpu_affinity fp8_config same_network "
    "main_training_function use_cpu mpirun_config megatron_lm_config deepspeed_config "
    "tpu_name tpu_zone tpu_use_cluster tpu_use_sudo tpu_env tpu_vm commands command_file"
)
ABOVE = {
    "distributed_type": Key(_distributed_type, LAUNCH),
    "mixed_precision": Key(_mixed_precision, FSDP2),
    "parallelism_config": fixed(Same("nothing: it is empty"), MESH),  # read() reads one that is not
    "dynamo_config": fixed(Same("torch.compile, if it asks for it: not a setting of FSDP"), LAUNCH),
    **dict.fromkeys(LAUNCHER.split(), fixed(Same("an option of torchrun"), LAUNCH)),
    **dict.fromkeys(OTHERS.split(), fixed(Same("nothing: not a setting of FSDP"), LAUNCH)),
}
