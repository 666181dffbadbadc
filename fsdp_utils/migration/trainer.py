"""TrainingArguments of transformers, and the training files built upon them such as axolotl's, in FSDP2.

Source: https://huggingface.co/docs/transformers/v5.13.0/en/main_classes/trainer
"""

from collections.abc import Mapping
from typing import Any

from fsdp_utils.migration import accelerate, deepspeed, reading
from fsdp_utils.migration.reading import Key, Lost, Same, Words, fixed, if_on, is_on, read_section
from fsdp_utils.migration.translation import FSDP2, STATE_DICT, TITAN, Row, Translation
from fsdp_utils.migration.values import TranslationError, elsewhere, shown

NAME = "transformers"
DOCS = "https://huggingface.co/docs/transformers/v5.13.0/en/main_classes/trainer"
AXOLOTL = "https://docs.axolotl.ai/docs/config-reference.html"
MARKS = {"fsdp", "base_model", "per_device_train_batch_size"}
# what DeepSpeed's file leaves as "auto", and the argument that the Trainer takes for it
AUTO = {
    "train_micro_batch_size_per_gpu": "per_device_train_batch_size",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "gradient_clipping": "max_grad_norm",
    "bf16": "bf16",
    "fp16": "fp16",
}


def is_mine(config: Mapping[str, Any]) -> bool:
    """Whether these are TrainingArguments, a training file built upon them, or an fsdp_config alone."""
    if {"distributed_type", "zero_optimization"} & set(config):
        return False
    section = config.get("fsdp_config")
    names = set(section) if isinstance(section, Mapping) else set()
    ours = any(str(name).startswith("fsdp_") or name in ONLY_HERE for name in names)
    return bool(MARKS & set(config)) or ours or _is_section(config)


def _is_section(config: Mapping[str, Any]) -> bool:
    """Whether this is what `fsdp_config` holds, in a file of its own."""
    return "fsdp_config" not in config and any(
        name in ONLY_HERE or str(name).removeprefix("fsdp_") in ONLY_HERE for name in config
    )


def read(config: Mapping[str, Any]) -> Translation:
    """Translate what concerns sharding. All else in a training file is not about FSDP."""
    if _is_section(config) and not MARKS & set(config):
        return _fsdp(config, {}, name="")
    section, options = config.get("fsdp_config"), config.get("fsdp")
    if isinstance(section, str):
        raise elsewhere("fsdp_config", section)
    if options or (section and ("fsdp" not in config or "base_model" in config)):
        return _fsdp(section or {}, config, name="fsdp_config")
    if config.get("deepspeed"):
        return _deepspeed(config)
    translation = Translation(NAME, ddp=True)
    words = "DistributedDataParallel: neither fsdp nor deepspeed is set"
    translation.rows.append(Row("fsdp", options, words, True, DOCS))
    if section:
        words = "nothing: without fsdp the Trainer does not look at it"
        translation.rows.append(Row("fsdp_config", section, words, True, DOCS))
    about = _about(config)
    about.pop("fsdp", None)
    read_section(about, ABOVE, translation, framework=NAME)
    return translation


def _about(config: Mapping[str, Any]) -> dict[str, Any]:
    """What concerns sharding, known or not."""
    words = ("fsdp", "parallel", "shard")
    return {
        key: value
        for key, value in config.items()
        if key not in ("fsdp_config", "deepspeed")
        and (key in ABOVE or any(word in str(key) for word in words))
    }


def _fsdp(section: Any, config: Mapping[str, Any], *, name: str) -> Translation:
    translation = Translation(NAME, state_dict="full")  # transformers' default
    about = _about(config)
    if not isinstance(section, Mapping):
        raise TranslationError(f"{name}: expected a section with keys, found {shown(section)}")
    if "fsdp" in about:  # first: a unit of the section may say otherwise
        read_section({"fsdp": about.pop("fsdp")}, ABOVE, translation, framework=NAME)
    version = section.get("fsdp_version", section.get("version", config.get("fsdp_version")))
    # axolotl has its own `fsdp2_prepare_model`, which leaves out Accelerate's float32 weights
    own = "base_model" in config and str(version) == "2"
    # Accelerate's are there with its mixed precision, not with a policy alone
    mixed = any(str(config.get(name)).lower() in ("true", "auto") for name in ("bf16", "fp16", "fp8"))
    translation.masters = mixed and not own
    keys = accelerate.fsdp_keys(section, str(version))
    keys |= accelerate.named_as_in(section, FSDP)
    read_section(section, keys, translation, name=name, framework=NAME)
    read_section(about, ABOVE, translation, framework=NAME)
    sizes = {name: about.get(key) or 1 for name, key in SIZES.items()}
    if all(isinstance(size, int) for size in sizes.values()) and max(sizes.values()) > 1:
        accelerate.set_mesh({**sizes, "sp": 1}, translation)
    return translation


def _deepspeed(config: Mapping[str, Any]) -> Translation:
    section = config["deepspeed"]
    if not isinstance(section, Mapping):
        raise elsewhere("deepspeed", section)
    filled = dict(section)
    for name, argument in AUTO.items():
        value = filled.get(name)
        if argument in config and value == "auto":
            filled[name] = config[argument]
        elif argument in config and isinstance(value, Mapping) and value.get("enabled") == "auto":
            filled[name] = {**value, "enabled": config[argument]}
    translation = deepspeed.read(filled)
    translation.framework = NAME
    decided = fixed(Same("nothing by itself: DeepSpeed's settings decide, and this fills in 'auto'"), DOCS)
    keys = {**ABOVE, "bf16": decided, "fp16": decided, "gradient_accumulation_steps": decided}
    about = _about(config)
    about.pop("fsdp", None)
    read_section(about, keys, translation, framework=NAME)
    return translation


def _options(value: Any, translation: Translation) -> Words:
    """The strategy, and what else stands beside it: "full_shard auto_wrap offload"."""
    items = value.split() if isinstance(value, str) else [] if isinstance(value, bool) else value
    if not isinstance(items, list) or not all(isinstance(item, str) for item in items):
        raise TranslationError(f"expected true or words such as 'full_shard auto_wrap', found {shown(value)}")
    said = []
    for item in items:
        if item.lower() == "offload":
            said.append(reading.offload(True, translation))
        elif item.lower() != "auto_wrap":
            said.append(reading.strategy(item, translation))
    return Same("; ".join(said) or "fully_shard on each block, then on the model")


def _bf16(value: Any, translation: Translation) -> Words:
    if value == "auto":  # axolotl's
        words = reading.precision("bfloat16", "bfloat16", translation)
        return type(words)(f"{words}. Where the GPU has no bf16: fp16")
    if value == "full":  # axolotl's
        return Same("nothing by itself: build the model in bf16, before shard_model")
    if is_on(value):
        return reading.precision("bfloat16", "bfloat16", translation)
    return Same("nothing: it is off")


def _fp16(value: Any, translation: Translation) -> Words:
    if not is_on(value) or translation.param_dtype:
        return Same("nothing: it is off" if not translation.param_dtype else "nothing: see bf16")
    return reading.precision("float16", "float16", translation)


def _checkpointing(value: Any, translation: Translation) -> Words:
    if isinstance(value, str) and value.lower() not in ("true", "false"):  # axolotl: where activations go
        translation.checkpointing = True
        return Lost(
            f"checkpoint_wrapper around each block, without {value!r}: torch.autograd.graph.save_on_cpu"
        )
    if not is_on(value) and translation.checkpointing:
        return Same("nothing: another key turns it on")
    return reading.checkpointing(value, translation)


def _checkpointing_kwargs(value: Any, translation: Translation) -> Words:
    if isinstance(value, Mapping) and value.get("use_reentrant") is True:
        return Lost("checkpoint_wrapper is used without reentry")
    if isinstance(value, Mapping) and (value.get("offload") or value.get("every_n_layers", 1) != 1):
        return Lost("checkpoint_wrapper around every block, and activations stay where they are")
    return Same("nothing: checkpoint_wrapper is used without reentry")


def _policy(value: Any, translation: Translation) -> Words:
    return reading.precision(reading.dtype(value), reading.dtype(value), translation)


def _offload(value: Any, translation: Translation) -> Words:
    translation.offload = False  # whatever `fsdp` says
    return reading.offload(is_on(value), translation)


def _pin_memory(value: Any, translation: Translation) -> Words:
    if is_on(value) or not translation.offload:
        return Same("nothing: CPUOffloadPolicy pins the memory")
    translation.pin_memory = False
    return Same("CPUOffloadPolicy(pin_memory=False)")


ONLY_HERE = {
    "version", "reshard_after_forward", "auto_wrap_policy", "transformer_layer_cls_to_wrap", "min_num_params",
    "cpu_ram_efficient_loading", "offload_params", "final_state_dict_type", "cpu_offload_pin_memory", "xla",
    "xla_fsdp_v2", "xla_fsdp_settings", "xla_fsdp_grad_ckpt",
}  # fmt: skip
XLA = Lost("torch_xla's own FSDP, for TPUs: no fully_shard")
FSDP = {
    **dict.fromkeys(("fsdp_offload_params", "fsdp_cpu_offload"), Key(_offload, FSDP2)),
    "fsdp_cpu_offload_pin_memory": Key(_pin_memory, AXOLOTL),
    "fsdp_final_state_dict_type": fixed(
        Same("the file of the last save: get_state_dict with these StateDictOptions"), STATE_DICT
    ),
    "fsdp_mixed_precision_policy": Key(_policy, AXOLOTL),
    "fsdp_xla": if_on(XLA, DOCS),
    "fsdp_xla_fsdp_v2": if_on(XLA, DOCS),
    "fsdp_xla_fsdp_grad_ckpt": if_on(XLA, DOCS),
    "fsdp_xla_fsdp_settings": fixed(XLA, DOCS),
}
SIZES = {
    "dp_replicate": "dp_replicate_size",
    "dp_shard": "dp_shard_size",
    "tp": "tensor_parallel_size",
    "cp": "context_parallel_size",
}
QUANTIZED = Lost(
    "bitsandbytes' weights: fully_shard cuts them only where they are stored as floating-point numbers "
    "(bnb_4bit_quant_storage)"
)


def _expert_parallel(value: Any, translation: Translation) -> Words:
    if reading.at_least_one(value) == 1:
        return Same("nothing: 1 is no dimension")
    return Lost(f"{reading.NOT_IN_CODE}Experts are divided among ranks by the model's own code")


OLDER = ("fsdp_version", "fsdp_transformer_layer_cls_to_wrap", "fsdp_min_num_params")
ABOVE = {
    "fsdp": Key(_options, TITAN),
    # beside fsdp_config, as in older versions
    **{name: accelerate.FSDP[name] for name in OLDER},
    "bf16": Key(_bf16, FSDP2),
    "fp16": Key(_fp16, FSDP2),
    "fp8": if_on(Lost("fully_shard has no fp8 of its own"), FSDP2),
    # its name from transformers 5.23 on, and the older one
    **dict.fromkeys(("activation_checkpointing", "gradient_checkpointing"), Key(_checkpointing, DOCS)),
    **dict.fromkeys(
        ("activation_checkpointing_kwargs", "gradient_checkpointing_kwargs"), Key(_checkpointing_kwargs, DOCS)
    ),
    "gradient_accumulation_steps": deepspeed.ABOVE["gradient_accumulation_steps"],
    "max_grad_norm": deepspeed.ABOVE["gradient_clipping"],
    "per_device_train_batch_size": fixed(Same("batch_size of the DataLoader"), DOCS),
    "micro_batch_size": fixed(Same("batch_size of the DataLoader"), AXOLOTL),
    **{key: accelerate.SIZES[name] for name, key in SIZES.items()},
    "expert_parallel_size": Key(_expert_parallel, AXOLOTL),
    **dict.fromkeys(("load_in_4bit", "load_in_8bit"), if_on(QUANTIZED, AXOLOTL)),
    "torch_compile": fixed(Same("torch.compile, if it asks for it: not a setting of FSDP"), DOCS),
}
