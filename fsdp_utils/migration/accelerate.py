"""Accelerate's config file in FSDP2.

Source: https://huggingface.co/docs/accelerate/v1.15.0/en/usage_guides/fsdp
"""

from collections.abc import Mapping
from typing import Any

from fsdp_utils.migration import deepspeed, reading
from fsdp_utils.migration.reading import Key, Lost, Same, Words, fixed, if_on, is_on, read_section
from fsdp_utils.migration.translation import FSDP2, GUIDE, STATE_DICT, TITAN, Row, Translation
from fsdp_utils.migration.values import TranslationError, elsewhere, shown

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
    kind = str(above.get("distributed_type", "FSDP"))
    sections = {name: above.pop(name, None) or {} for name in ("fsdp_config", "deepspeed_config")}
    if kind == "FSDP":
        used, translation = "fsdp_config", _fsdp(sections["fsdp_config"])
    elif kind == "DEEPSPEED":
        used, translation = "deepspeed_config", _deepspeed(sections["deepspeed_config"], above)
    else:
        used, translation = "", Translation(NAME, ddp=True)
    parallelism = above.pop("parallelism_config", None)
    if parallelism:
        _parallelism(parallelism, translation, kind)
    keys = ABOVE if "mixed_precision" in above else {**ABOVE, "fp16": OLD_FP16}
    read_section(above, keys, translation, framework=NAME)
    for name, section in sections.items():
        if section and name != used:
            words = f"nothing: with distributed_type {kind} Accelerate does not look at it"
            translation.rows.append(Row(name, section, words, True, LAUNCH))
    return translation


def _fsdp(section: Any) -> Translation:
    # Accelerate's defaults: one unit; a full state dict with FSDP1, a sharded one with FSDP2
    version = str(section.get("fsdp_version", section.get("version"))) if isinstance(section, Mapping) else ""
    kind = "sharded" if version == "2" else "full"
    translation = Translation(NAME, blocks=(), state_dict=kind, masters=True)
    keys = fsdp_keys(section, version) if isinstance(section, Mapping) else FSDP
    read_section(section, keys, translation, name="fsdp_config", framework=NAME)
    return translation


def fsdp_keys(section: Mapping[Any, Any], version: str) -> dict[str, Key]:
    """The keys of FSDP's section, by the names that it gives them: with "fsdp_" before them or without."""
    keys = dict(FSDP)
    if version == "2":
        keys |= dict.fromkeys(VERSION_1, fixed(Same("nothing: not looked at with fsdp_version 2"), DOCS))
    elif "fsdp_sharding_strategy" in section:
        keys["fsdp_reshard_after_forward"] = fixed(Same("nothing: see fsdp_sharding_strategy"), PLUGIN)
    return named_as_in(section, keys)


def named_as_in(section: Mapping[Any, Any], keys: Mapping[str, Key]) -> dict[str, Key]:
    """These keys, by the names that the section gives them."""
    given = {name if str(name).startswith("fsdp_") else f"fsdp_{name}": name for name in section}
    return {given.get(name, name): key for name, key in keys.items()}


def _deepspeed(section: Any, above: dict[Any, Any]) -> Translation:
    file = section.get("deepspeed_config_file") if isinstance(section, Mapping) else None
    if isinstance(file, Mapping):
        return _deepspeed_file(file, section, above)
    if file not in (None, "none"):
        raise elsewhere("deepspeed_config.deepspeed_config_file", file)
    translation = Translation(NAME, reshard_after_forward=False, masters=True)
    if not isinstance(section, Mapping) or "zero_stage" not in section:
        words = "reshard_after_forward=False: Accelerate's default is stage 2"
        translation.rows.append(Row("deepspeed_config.zero_stage", None, words, True, DEEPSPEED_PLUGIN))
    read_section(section, DEEPSPEED, translation, name="deepspeed_config", framework=NAME)
    return translation


def _deepspeed_file(file: Mapping[str, Any], section: Any, above: dict[Any, Any]) -> Translation:
    """DeepSpeed's own file decides; Accelerate's mixed_precision fills in what the file leaves open."""
    precision = above.pop("mixed_precision", None)
    file = dict(file)
    for name in ("bf16", "fp16") if precision is not None else ():
        part = file.get(name, {"enabled": "auto"})
        if isinstance(part, Mapping) and part.get("enabled") == "auto":
            file[name] = {**part, "enabled": name == ("bf16" if precision == "fp8" else precision)}
    translation = deepspeed.read(file)
    translation.framework = NAME
    decided = fixed(Same("nothing by itself: DeepSpeed's file decides"), DEEPSPEED_PLUGIN)
    others = {name: key if name == "zero3_init_flag" else decided for name, key in DEEPSPEED.items()}
    rest = {name: value for name, value in section.items() if name != "deepspeed_config_file"}
    read_section(rest, others, translation, name="deepspeed_config", framework=NAME)
    if precision is not None:
        fp8 = precision == "fp8"
        words = NO_FP8 if fp8 else "nothing by itself: see bf16 and fp16, which it fills in"
        translation.rows.append(Row("mixed_precision", precision, words, not fp8, DEEPSPEED_PLUGIN))
    return translation


def _distributed_type(value: Any, translation: Translation) -> Words:
    if value == "FSDP":
        return Same("fully_shard")
    if value == "DEEPSPEED":
        return Same("DistributedDataParallel" if translation.ddp else "fully_shard")
    if str(value).startswith("MULTI_") or value in ("NO", False):  # YAML's NO without quotes is False
        return Same("DistributedDataParallel: nothing is sharded")
    raise TranslationError(f"expected 'FSDP', 'DEEPSPEED', 'MULTI_GPU' or 'NO', found {shown(value)}")


def _mixed_precision(value: Any, translation: Translation) -> Words:
    if value == "fp8":
        words = reading.precision("bfloat16", "bfloat16", translation)  # as Accelerate sets beside its fp8
        return Lost(f"{words}. {NO_FP8}")
    return reading.precision(reading.dtype(value), reading.dtype(value), translation)


NO_FP8 = "fully_shard has no fp8 of its own: bf16 stands for it"


def _parallelism(section: Any, translation: Translation, kind: str) -> None:
    """The sizes of Accelerate's mesh."""
    read_section(section, PARALLELISM, translation, name="parallelism_config", framework=NAME)
    sizes = {name: section.get(f"parallelism_config_{name}_size") or 1 for name in SIZES}
    if kind != "FSDP":
        return
    if text := [name for name, size in sizes.items() if not isinstance(size, int)]:  # from outside the file
        raise TranslationError(
            f"parallelism_config.parallelism_config_{text[0]}_size: expected a whole number, found "
            f"{shown(sizes[text[0]])}"
        )
    set_mesh(sizes, translation)


def set_mesh(sizes: Mapping[str, int], translation: Translation) -> None:
    """The mesh of these sizes: Accelerate shards over dp_shard and cp together."""
    if sizes["dp_shard"] * sizes["cp"] == 1:
        raise TranslationError(
            "parallelism_config: expected dp_shard_size or cp_size above 1, found 1. Accelerate refuses it "
            "too: FSDP has no ranks to shard over"
        )
    if sizes["sp"] == 1 and (sizes["dp_replicate"] > 1 or sizes["tp"] > 1):  # sp is DeepSpeed's: no mesh
        translation.shard_size = sizes["dp_shard"] * sizes["cp"]
        translation.copies = sizes["dp_replicate"]


def _size(words: Words) -> Key:
    """A size of the mesh, of which something is to be said only where it is above 1."""
    alone = Same("nothing: 1 is no dimension")
    return Key(lambda value, translation: words if reading.at_least_one(value) > 1 else alone, MESH)


def _shard_size(value: Any, translation: Translation) -> Words:
    if reading.at_least_one(value) > 1 and translation.ddp:
        return Lost("nothing is sharded: the distributed_type is not FSDP")
    return Same("the ranks that share one copy")


def _reshard(value: Any, translation: Translation) -> Words:
    if str(value).lower() not in ("true", "false"):
        return reading.strategy(value, translation)  # with FSDP1 this key, too, holds a strategy
    return reading.reshard(is_on(value), translation)


def _wrap(value: Any, translation: Translation) -> Words:
    policy = reading.one_of(value, ("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP"))
    if policy == "NO_WRAP":
        return Same("fully_shard(model) alone: one unit")
    translation.blocks = None
    if policy == "SIZE_BASED_WRAP":
        return Lost("no policy by size: here each transformer block becomes a unit")
    return Same("fully_shard on each block, then on the model")


def _classes(value: Any, translation: Translation) -> Words:
    names = value.split(",") if isinstance(value, str) else value
    # identifiers, and nothing else: the names go into the code that is written
    if not isinstance(names, list) or not all(isinstance(n, str) and n.strip().isidentifier() for n in names):
        raise TranslationError(f"expected names of classes with commas between them, found {shown(value)}")
    if translation.blocks == () or not names:
        return Same("nothing: without TRANSFORMER_BASED_WRAP Accelerate does not look at it")
    translation.blocks = tuple(name.strip() for name in names)
    return Same(f"fully_shard on each {', '.join(translation.blocks)}")


def _checkpointing(value: Any, translation: Translation) -> Words:
    words = reading.checkpointing(value, translation)
    return Same(f"{words}{RNG}") if translation.checkpointing else words


RNG = (
    ". It draws the same dropout masks again. Accelerate does not with fsdp_version 2, for it passes "
    "preserve_rng_state=False: its gradients under dropout are wrong"
)
RANK0 = Same("meta device, then set_model_state_dict with full_state_dict=True, broadcast_from_rank0=True")
SAVE_ON_CPU = Lost("not part of fully_shard: torch.autograd.graph.save_on_cpu in the block's forward")
FSDP = {
    "fsdp_version": fixed(Same("fully_shard is version 2"), DOCS),
    "fsdp_sharding_strategy": Key(reading.strategy, TITAN),
    "fsdp_reshard_after_forward": Key(_reshard, DOCS),
    "fsdp_auto_wrap_policy": Key(_wrap, TITAN),
    "fsdp_transformer_layer_cls_to_wrap": Key(_classes, GUIDE),
    "fsdp_min_num_params": fixed(Lost("no policy by size: name the blocks"), TITAN),
    "fsdp_backward_prefetch": Key(reading.backward_prefetch, DOCS),
    "fsdp_backward_prefetch_policy": Key(reading.backward_prefetch, DOCS),  # its name in 2023
    "fsdp_forward_prefetch": if_on(Same("set_modules_to_forward_prefetch, on each block"), FSDP2),
    "fsdp_offload_params": Key(lambda value, t: reading.offload(is_on(value), t), FSDP2),
    "fsdp_state_dict_type": Key(reading.state_dict, STATE_DICT),
    "fsdp_cpu_ram_efficient_loading": if_on(RANK0, GUIDE),
    "fsdp_sync_module_states": if_on(RANK0, GUIDE),
    "fsdp_use_orig_params": fixed(Same("nothing: parameters keep their names and shapes"), DOCS),
    "fsdp_activation_checkpointing": Key(_checkpointing, PLUGIN),
    "fsdp_activation_checkpointing_offload": if_on(SAVE_ON_CPU, PLUGIN),
    "fsdp_ignored_modules": fixed(Same("ignored_params=..., a set of parameters; from torch 2.7 on"), FSDP2),
    "fsdp_limit_all_gathers": fixed(Same("nothing: FSDP2 needs no such limit"), TITAN),
}
VERSION_1 = (
    "fsdp_sharding_strategy", "fsdp_backward_prefetch", "fsdp_backward_prefetch_policy",
    "fsdp_forward_prefetch", "fsdp_use_orig_params", "fsdp_sync_module_states", "fsdp_limit_all_gathers",
)  # fmt: skip
CONTEXT = (
    "not part of fully_shard: the code shards over these ranks too. context_parallel of "
    "torch.distributed.tensor.experimental, around the step; without it each of them has a batch of its own"
)
SIZES = {
    "dp_replicate": _size(Same("the first dimension of the mesh: copies")),
    "dp_shard": Key(_shard_size, MESH),
    "tp": Key(reading.tensor_parallel, MESH),
    "cp": _size(Lost(CONTEXT)),
    "sp": _size(Lost(f"{reading.NOT_IN_CODE}It is DeepSpeed's (Ulysses)")),
}
PARALLELISM = {
    **{f"parallelism_config_{name}_size": key for name, key in SIZES.items()},
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
DEEPSPEED_PLUGIN = "https://huggingface.co/docs/accelerate/v1.15.0/en/package_reference/deepspeed"


def _offload(name: str) -> Key:
    read, source, _ = deepspeed.ZERO[name]
    return Key(lambda value, translation: read({"device": value}, translation), source)


DEEPSPEED = {
    "zero_stage": deepspeed.ZERO["stage"],
    "offload_param_device": _offload("offload_param"),
    "offload_optimizer_device": _offload("offload_optimizer"),
    "zero3_save_16bit_model": deepspeed.ZERO["stage3_gather_16bit_weights_on_model_save"],
    "zero3_init_flag": if_on(Same("meta device, as the model is built"), GUIDE),
    "gradient_accumulation_steps": deepspeed.ABOVE["gradient_accumulation_steps"],
    "gradient_clipping": deepspeed.ABOVE["gradient_clipping"],
    "seq_parallel_communication_data_type": fixed(Lost("Ulysses is DeepSpeed's"), DEEPSPEED_PLUGIN),
    **dict.fromkeys(
        ("transformer_moe_cls_names", "deepspeed_moe_layer_cls_names"),
        fixed(Lost("name the class among the blocks: a unit is gathered as a whole"), DEEPSPEED_PLUGIN),
    ),
    **dict.fromkeys(
        ("offload_param_nvme_path", "offload_optimizer_nvme_path"),
        fixed(Same("nothing by itself: see the device"), DEEPSPEED_PLUGIN),
    ),
    **dict.fromkeys(
        (
            "deepspeed_multinode_launcher", "deepspeed_hostfile", "deepspeed_exclusion_filter",
            "deepspeed_inclusion_filter", "deepspeed_config_file",
        ),
        fixed(Same("an option of the launcher"), DEEPSPEED_PLUGIN),
    ),
}  # fmt: skip
LAUNCHER = "num_processes num_machines machine_rank main_process_ip main_process_port rdzv_backend gpu_ids"
OTHERS = (
    "compute_environment debug downcast_bf16 enable_cpu_affinity fp8_config same_network "
    "main_training_function use_cpu mpirun_config megatron_lm_config "
    "tpu_name tpu_zone tpu_use_cluster tpu_use_sudo tpu_env tpu_vm commands command_file"
)
OLD_FP16 = Key(lambda value, t: _mixed_precision("fp16" if is_on(value) else "no", t), LAUNCH)
ABOVE = {
    "distributed_type": Key(_distributed_type, LAUNCH),
    "deepspeed_config": fixed(Same("nothing: it is empty"), LAUNCH),  # read() reads one that is not
    "mixed_precision": Key(_mixed_precision, FSDP2),
    "parallelism_config": fixed(Same("nothing: it is empty"), MESH),  # read() reads one that is not
    **dict.fromkeys(
        ("fp16", "dynamo_backend"),  # of older versions
        fixed(Same("nothing: not a setting of sharding"), LAUNCH),
    ),
    "gradient_accumulation_steps": deepspeed.ABOVE["gradient_accumulation_steps"],
    "dynamo_config": fixed(Same("torch.compile, if it asks for it: not a setting of FSDP"), LAUNCH),
    **dict.fromkeys(LAUNCHER.split(), fixed(Same("an option of torchrun"), LAUNCH)),
    **dict.fromkeys(OTHERS.split(), fixed(Same("nothing: not a setting of FSDP"), LAUNCH)),
}
