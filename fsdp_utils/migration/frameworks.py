"""Translate the configs of four frameworks: their sections, and their defaults for what is not set."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fsdp_utils.migration.files import read_config
from fsdp_utils.migration.rules import Rule, Said, apply_rules, read_section, rules_of, whole_number
from fsdp_utils.migration.translation import Row, Translation, TranslationError, shown

MARKS = {"fsdp", "base_model", "per_device_train_batch_size"}  # keys of transformers or axolotl alone


def translate(
    config: str | Path | Mapping[str, Any], *, given: Mapping[str, Any] | None = None
) -> Translation:
    """Translate a config to FSDP2. The config's keys tell whose it is.

    Args:
        config: the file (.json, .yaml or .yml) or what is in it: of `accelerate config`; transformers'
            TrainingArguments, their `fsdp_config` alone, or axolotl's file; Composer's `parallelism_config`
            or LLM Foundry's `fsdp_config`; DeepSpeed's JSON.
        given: values that the config leaves open, such as "auto" and OmegaConf's `${...}`, by the names that
            the rows have: {"bf16.enabled": True}.

    Returns:
        The settings, with `.code()`, `.rows`, `.without_counterpart` and a table as `str()`.

    Raises:
        TranslationError (a ValueError): the config is none of these, the file cannot be parsed, or a value
            is unknown. An unknown key gets a row that is marked as lost.
        TypeError: the config is neither a file nor a dict.
        OSError: the file cannot be read.
        ModuleNotFoundError: a YAML file, and PyYAML is not installed.

    Source: each row names its own.

    Example::

        found = translate("ds_config.json")
        Path("shard_model.py").write_text(found.code())
        for row in found.rows:
            print(row.key, "->", row.fsdp2)
    """
    settings = read_config(config, given or {})
    return _framework_of(settings)(settings)


def _framework_of(config: Mapping[str, Any]) -> Callable[[Mapping[str, Any]], Translation]:
    if "distributed_type" in config:
        return _accelerate
    if "zero_optimization" in config:
        return _deepspeed
    if MARKS & set(config) or _is_trainers(config.get("fsdp_config", config)):
        return _transformers
    if {"parallelism_config", "fsdp_config"} & set(_training(config)):
        return _composer
    if {"train_batch_size", "train_micro_batch_size_per_gpu"} & set(config):
        return _deepspeed
    found = ", ".join(shown(key) for key in list(config)[:20]) or "no key"
    raise TranslationError(
        "expected a config with the key 'distributed_type' (Accelerate), 'fsdp' or 'fsdp_config' "
        "(transformers, Composer), 'parallelism_config' (Composer) or 'zero_optimization' (DeepSpeed), found "
        f"{found}"
    )


def _is_trainers(section: Any) -> bool:
    """Tell whether a section has keys of transformers' fsdp_config that Composer's does not have."""
    names = {str(name) for name in section} if isinstance(section, Mapping) else set()
    names -= set(rules_of("composer", "fsdp_config"))
    return any(name.startswith("fsdp_") or f"fsdp_{name}" in _trainers_rules() for name in names)


def _trainers_rules() -> dict[str, list[Rule]]:
    """Return Accelerate's rows for the section, and those of transformers in place of or after them."""
    return {**rules_of("accelerate", "fsdp_config"), **rules_of("transformers", "fsdp_config")}


def _training(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the training's settings, which a run on MosaicML's platform has in a section "parameters"."""
    parameters = config.get("parameters")
    return parameters if isinstance(parameters, Mapping) else config


def _accelerate(config: Mapping[str, Any]) -> Translation:
    above = {key: value for key, value in config.items() if value != {}}
    used = {"FSDP": "fsdp_config", "DEEPSPEED": "deepspeed_config"}.get(str(config["distributed_type"]), "")
    translation = Translation("Accelerate", ddp=not used, masters=bool(used))
    section = above.pop(used, None) or {}
    if used == "fsdp_config" and isinstance(section, Mapping):
        version = section.get("fsdp_version", section.get("version"))
        translation.blocks, translation.state_dict = (), "sharded" if str(version) == "2" else "full"
    elif isinstance(section, Mapping):
        section = {"zero_stage": 2, **section}  # Accelerate's default
    if used:
        read_section(section, rules_of("accelerate", used), translation, name=used, readers=READERS)
    mesh = above.pop("parallelism_config", None)
    if mesh:
        rules = rules_of("accelerate", "parallelism_config")
        read_section(mesh, rules, translation, name="parallelism_config")
    if mesh and used == "fsdp_config":
        _set_mesh(mesh, "parallelism_config_{}_size".format, translation)
    read_section(above, rules_of("accelerate", "config"), translation)
    return translation


def _set_mesh(sizes: Mapping[str, Any], key_of: Callable[[str], str], translation: Translation) -> None:
    names = ("dp_shard", "cp", "dp_replicate", "sp")
    shard, context, copies, sp = (whole_number(sizes.get(key_of(name))) or 1 for name in names)
    if shard * context == 1:
        raise TranslationError(
            "parallelism_config: expected dp_shard_size or cp_size above 1, found 1. Accelerate refuses it "
            "too: FSDP has no ranks to shard over"
        )
    if sp == 1 and (copies > 1 or translation.tensor_parallel > 1):  # sp is DeepSpeed's: no dimension
        translation.shard_size, translation.copies = shard * context, copies


def _transformers(config: Mapping[str, Any]) -> Translation:
    """Translate what concerns sharding in TrainingArguments, and in axolotl's files."""
    rules, name = rules_of("transformers", "config"), "fsdp_config"
    if "fsdp_config" not in config and not MARKS & set(config):  # a file of the section alone
        config, name = {"fsdp_config": config}, ""
    options, section = config.get("fsdp"), config.get("fsdp_config") or {}
    about = ("fsdp", "parallel")
    above = {key: config[key] for key in config if key in rules or any(word in str(key) for word in about)}
    if not options and not (section and ("fsdp" not in config or "base_model" in config)):
        words = "DistributedDataParallel: neither fsdp nor deepspeed is set"
        row = Row("fsdp", above.pop("fsdp", None), words, True, rules["fsdp"][0].source)
        translation = Translation("transformers", ddp=True, rows=[row])
        read_section(above, rules, translation, readers=READERS)
        return translation
    translation = Translation("transformers", state_dict="full")
    read_section(
        {key: above.pop(key) for key in ("fsdp",) if key in above}, rules, translation, readers=READERS
    )
    above.pop("fsdp_config", None)
    # Accelerate's float32 weights are there with its mixed precision, not with a policy alone; axolotl's own
    # `fsdp2_prepare_model` leaves them out
    beside = {"fsdp_version": config.get("fsdp_version")}
    if isinstance(section, Mapping):
        beside["fsdp_version"] = section.get("version", section.get("fsdp_version", beside["fsdp_version"]))
    mixed = any(str(config.get(name)).lower() in ("true", "auto") for name in ("bf16", "fp16", "fp8"))
    translation.masters = mixed and not ("base_model" in config and str(beside["fsdp_version"]) == "2")
    read_section(section, _trainers_rules(), translation, name=name, beside=beside, readers=READERS)
    read_section(above, rules, translation, readers=READERS)
    keys = {"cp": "context_parallel_size", "dp_shard": "dp_shard_size", "dp_replicate": "dp_replicate_size"}
    if translation.tensor_parallel > 1 or any(config.get(key, 1) != 1 for key in keys.values()):
        _set_mesh(config, lambda name: keys.get(name, ""), translation)
    return translation


def _options(value: Any, translation: Translation) -> Said:
    """Read the strategy, and what else stands beside it: "full_shard auto_wrap offload"."""
    items = value.split() if isinstance(value, str) else [] if isinstance(value, bool) else value
    if not isinstance(items, list):
        raise TranslationError(f"expected true or words such as 'full_shard auto_wrap', found {shown(value)}")
    rules, said = rules_of("shared", "keys"), []
    for item in items:
        if str(item).lower() == "offload":
            said.append(apply_rules(True, rules["offload"], translation))
        elif str(item).lower() != "auto_wrap":
            said.append(apply_rules(item, rules["strategy"], translation))
    return Said("; ".join(one.words for one in said) or "fully_shard on each block, then on the model")


def _classes(value: Any, translation: Translation) -> Said:
    names = value.split(",") if isinstance(value, str) else value
    # identifiers, and nothing else: the names go into the code that is written
    if not isinstance(names, list) or not all(isinstance(n, str) and n.strip().isidentifier() for n in names):
        raise TranslationError(f"expected names of classes with commas between them, found {shown(value)}")
    if translation.blocks == () or not names:
        return Said("nothing: without TRANSFORMER_BASED_WRAP Accelerate does not look at it")
    translation.blocks = tuple(name.strip() for name in names)
    return Said(f"fully_shard on each {', '.join(translation.blocks)}")


READERS = {"fsdp": _options, "fsdp_transformer_layer_cls_to_wrap": _classes}


def _composer(config: Mapping[str, Any]) -> Translation:
    """Translate Composer's parallelism_config or LLM Foundry's fsdp_config, and `precision`."""
    config, rules = _training(config), rules_of("composer", "config")
    section, name, others = config.get("fsdp_config"), "fsdp_config", config.get("parallelism_config") or {}
    if section is None and not others:
        words = "DistributedDataParallel: nothing is sharded"
        row = Row("fsdp_config", None, words, True, rules["precision"][0].source)
        return Translation("Composer", ddp=True, rows=[row])
    if section is None:
        if not isinstance(others, Mapping) or "fsdp" not in others:
            raise TranslationError(f"parallelism_config: expected a section 'fsdp', found {shown(others)}")
        section, name = others["fsdp"] or {}, "parallelism_config.fsdp"
        others = {key: value for key, value in others.items() if key != "fsdp"}
    translation = Translation("Composer", state_dict="full")  # Composer's default
    if isinstance(section, Mapping):
        section = {"mixed_precision": "DEFAULT", **section}
    read_section(section, rules_of("composer", "fsdp_config"), translation, name=name, beside=config)
    tensor = rules_of("composer", "parallelism_config")
    read_section(others, tensor, translation, name="parallelism_config")
    above = {key: config[key] for key in rules if key in config}  # all else is not about FSDP
    read_section(above, rules, translation)
    return translation


def _deepspeed(config: Mapping[str, Any]) -> Translation:
    translation, auto = Translation("DeepSpeed", ddp=True), "transformers' Trainer fills it in"
    above = dict(config)
    zero = above.pop("zero_optimization", None) or {}
    rules = rules_of("deepspeed", "zero_optimization")
    read_section(zero, rules, translation, name="zero_optimization", auto=auto)
    for name in ("bf16", "bfloat16", "fp16"):
        section, rules = above.pop(name, None) or {}, rules_of("deepspeed", "precision")
        if isinstance(section, Mapping) and str(section.get("enabled")).lower() == "true":
            low = (section.get(f"{kind}_master_weights_and_grads") for kind in ("bf16", "fp16"))
            translation.masters = not any(str(on).lower() == "true" for on in low)
        beside = {**above, "section": name}
        read_section(section, rules, translation, name=name, beside=beside, auto=auto)
    read_section(above, rules_of("deepspeed", "config"), translation, auto=auto)
    return translation
