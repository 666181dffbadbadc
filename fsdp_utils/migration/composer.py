"""Composer's `parallelism_config`, or LLM Foundry's `fsdp_config`, in FSDP2.

Source: https://docs.mosaicml.com/projects/composer/en/stable/notes/distributed_training.html
"""

from collections.abc import Mapping
from typing import Any

from fsdp_utils.migration import reading, trainer
from fsdp_utils.migration.reading import Key, Lost, Same, Words, fixed, if_on, is_on, read_section
from fsdp_utils.migration.translation import FSDP2, GUIDE, STATE_DICT, TITAN, Row, Translation
from fsdp_utils.migration.values import TranslationError, shown

NAME = "Composer"
API = "https://docs.mosaicml.com/projects/composer/en/latest/api_reference/generated/composer.utils"
CONFIG = f"{API}.FSDPConfig.html"
NOTES = "https://docs.mosaicml.com/projects/composer/en/stable/notes/distributed_training.html"


def is_mine(config: Mapping[str, Any]) -> bool:
    """Whether this is what Composer's Trainer takes."""
    ours = "parallelism_config" in config or "fsdp_config" in config
    return ours and "distributed_type" not in config and not trainer.is_mine(config)


def training(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The training's settings: those of a run on MosaicML's platform are in a section of their own."""
    parameters = config.get("parameters")
    return parameters if isinstance(parameters, Mapping) and "fsdp_config" in parameters else config


def read(config: Mapping[str, Any]) -> Translation:
    """Translate the section of FSDP, and `precision`. All else in a training file is not about FSDP."""
    name, section = "fsdp_config", config.get("fsdp_config")
    parallelism = config.get("parallelism_config")
    if section is None and parallelism is None:
        row = Row("fsdp_config", None, "DistributedDataParallel: nothing is sharded", True, NOTES)
        return Translation(NAME, ddp=True, rows=[row])
    if section is None:
        if not isinstance(parallelism, Mapping) or "fsdp" not in parallelism:
            found = shown(parallelism)
            raise TranslationError(f"parallelism_config: expected a section 'fsdp', found {found}")
        name, section = "parallelism_config.fsdp", parallelism["fsdp"]
    elif parallelism is not None:
        raise TranslationError(
            "fsdp_config: expected it or parallelism_config, found both: leave out the one that is not meant"
        )
    translation = Translation(NAME, state_dict="full")  # Composer's default
    computing = _trainers(config)
    dtypes = ("param_dtype", "reduce_dtype", "buffer_dtype")
    mixed = Key(lambda value, t: _mixed_precision(value, computing, t), NOTES, inside=dtypes)
    read_section(section, {**FSDP, "mixed_precision": mixed}, translation, name=name, framework=NAME)
    others = {key: value for key, value in (parallelism or {}).items() if key != "fsdp"}
    read_section(others, {"tp": TENSOR}, translation, name="parallelism_config", framework=NAME)
    if "tp_config" in config:  # LLM Foundry's
        read_section({"tp_config": config["tp_config"]}, {"tp_config": TENSOR}, translation, framework=NAME)
    words: Words = Same("see mixed_precision")
    if "mixed_precision" not in (section or {}):
        words = _mixed_precision("DEFAULT", computing, translation)
    row = Row("precision", config.get("precision"), str(words), isinstance(words, Same), NOTES)
    translation.rows.append(row)
    return translation


def _trainers(config: Mapping[str, Any]) -> str | None:
    """What the Trainer computes in, if the config says it."""
    if "${" in str(config.get("precision", "${")):  # not there, or to come from outside the file
        return None
    try:
        return reading.dtype(str(config["precision"]).removeprefix("amp_"))
    except TranslationError:
        found = config["precision"]
        raise TranslationError(
            f"precision: expected fp32, amp_bf16 or amp_fp16, found {shown(found)}"
        ) from None


def _mixed_precision(value: Any, computing: str | None, translation: Translation) -> Words:
    if isinstance(value, Mapping):
        param = reading.dtype("fp32" if value.get("param_dtype") is None else value["param_dtype"])
        reduce = param if value.get("reduce_dtype") is None else reading.dtype(value["reduce_dtype"])
        return reading.precision(param, reduce, translation)
    kind = reading.one_of(value, ("DEFAULT", "PURE", "FULL"))
    if kind == "FULL":
        return reading.precision("float32", "float32", translation)
    if computing is None:
        return Lost("depends on the Trainer's precision, which is not in this config: add 'precision'")
    return reading.precision(computing, computing if kind == "PURE" else "float32", translation)


def _shard_degree(value: Any, translation: Translation) -> Words:
    if reading.number(value) < 1:
        return Same("nothing: over all ranks")
    translation.shard_size = value
    return Same("the second dimension of a 2-D mesh")


def _replicate_degree(value: Any, translation: Translation) -> Words:
    if value is None or reading.number(value) in (0, 1):
        return Same("nothing: one copy")
    if reading.number(value) < 0:
        if translation.shard_size is None:
            raise TranslationError(
                "expected data_parallel_shard_degree beside it: one of the two can be left open"
            )
        return Same("the first dimension of a 2-D mesh: as many copies as the ranks make")
    translation.copies = value
    return Same("the first dimension of a 2-D mesh")


def _auto_wrap(value: Any, translation: Translation) -> Words:
    translation.blocks = None if is_on(value) else ()
    return Same(
        "fully_shard on each block, then on the model" if is_on(value) else "fully_shard(model) alone"
    )


def _tensor_parallel(value: Any, translation: Translation) -> Words:
    if not value:
        return Same("nothing: none is asked for")
    if isinstance(value, Mapping) and "tensor_parallel_degree" in value:
        return reading.tensor_parallel(value["tensor_parallel_degree"], translation)
    return Lost(f"{reading.NOT_IN_CODE}parallelize_module over one more dimension of the mesh")


TENSOR = Key(_tensor_parallel, NOTES)
RANK0 = Same("set_model_state_dict with full_state_dict=True, broadcast_from_rank0=True")
SAVE_ON_CPU = Lost("not part of fully_shard: torch.autograd.graph.save_on_cpu in the block's forward")
FSDP = {
    "data_parallel_shard_degree": Key(_shard_degree, FSDP2),  # first: a strategy takes this size over
    "data_parallel_replicate_degree": Key(_replicate_degree, FSDP2),
    "sharding_strategy": Key(reading.strategy, TITAN),
    "mixed_precision": fixed(Same(""), NOTES),  # read() puts in what it takes
    "auto_wrap": Key(_auto_wrap, TITAN),
    "activation_checkpointing": Key(reading.checkpointing, CONFIG),
    "activation_checkpointing_reentrant": if_on(Lost("checkpoint_wrapper is used without reentry"), CONFIG),
    "activation_cpu_offload": if_on(SAVE_ON_CPU, CONFIG),
    "cpu_offload": Key(lambda value, t: reading.offload(is_on(value), t), FSDP2),
    "backward_prefetch": Key(reading.backward_prefetch, TITAN),
    "backward_prefetch_limit": fixed(Same("set_modules_to_backward_prefetch, with that many"), FSDP2),
    "forward_prefetch": if_on(Same("set_modules_to_forward_prefetch, on each block"), FSDP2),
    "forward_prefetch_limit": fixed(Same("set_modules_to_forward_prefetch, with that many"), FSDP2),
    "limit_all_gathers": fixed(Same("nothing: FSDP2 needs no such limit"), TITAN),
    "use_orig_params": fixed(Same("nothing: parameters keep their names and shapes"), TITAN),
    "sync_module_states": if_on(RANK0, GUIDE),
    "load_monolith_rank0_only": if_on(RANK0, GUIDE),
    "state_dict_type": Key(reading.state_dict, STATE_DICT),
    "sharded_ckpt_prefix_dir": fixed(Same("checkpoint_id= of torch.distributed.checkpoint.save"), STATE_DICT),
    "load_planner": fixed(Same("planner= of torch.distributed.checkpoint.load"), STATE_DICT),
    "save_planner": fixed(Same("planner= of torch.distributed.checkpoint.save"), STATE_DICT),
    "ignored_modules": fixed(Same("ignored_params=..., a set of parameters; from torch 2.7 on"), FSDP2),
    "keep_low_precision_grads": if_on(Lost("gradients get the dtype of the sharded parameters"), FSDP2),
    "process_group": fixed(Lost("groups are given as a mesh: init_device_mesh"), TITAN),
    "te_checkpoint_wrapper": if_on(Lost("of Transformer Engine"), CONFIG),
    "te_shard_fp8_weight": if_on(Lost("of Transformer Engine"), CONFIG),
    "verbose": fixed(Same("nothing: about what Composer prints"), CONFIG),
}
