"""Translate the configs of four frameworks: their sections, and their defaults for what is not set."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fsdp_utils.migration.files import read_config
from fsdp_utils.migration.rules import Rule, read_section, rules_of, whole_number
from fsdp_utils.migration.translation import Row, Translation, TranslationError, shown

MARKS = {"fsdp", "base_model", "per_device_train_batch_size"}  # keys of transformers or axolotl alone


def translate(
    config: str | Path | Mapping[str, Any], *, given: Mapping[str, Any] | None = None
) -> Translation:
    """Translate a config to FSDP2. The config's keys tell whose it is.

    Args:
        config: the file (.json, .yaml or .yml) or what is in it: of `accelerate config`, transformers'
            TrainingArguments or their `fsdp_config`, axolotl, Composer, LLM Foundry or DeepSpeed.
        given: values that the config leaves open, such as "auto" and OmegaConf's `${...}`, by the names that
            the rows have: {"bf16.enabled": True}.

    Returns:
        The settings, with `.code()`, `.rows`, `.without_counterpart` and a table as `str()`.

    Raises:
        TranslationError (a ValueError): the config is none of these, or cannot be parsed, or a value is
            unknown. An unknown key gets a row that is marked as lost.
        OSError: the file cannot be read.

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
        "expected a config with the key 'distributed_type' (Accelerate), 'fsdp', 'fsdp_config' "
        f"(transformers), 'parallelism_config' (Composer) or 'zero_optimization' (DeepSpeed), found {found}"
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


def _section(config: Mapping[str, Any], path: str) -> Mapping[str, Any]:
    """Return a section of a config, empty where it is not set."""
    section: Any = config
    for name in path.split("."):
        section = section.get(name) or {}
        if not isinstance(section, Mapping):
            raise TranslationError(f"{path}: expected a section with keys, found {shown(section)}")
    return section


def _accelerate(config: Mapping[str, Any]) -> Translation:
    used = {"FSDP": "fsdp_config", "DEEPSPEED": "deepspeed_config"}.get(str(config["distributed_type"]), "")
    translation = Translation("Accelerate", ddp=not used, masters=bool(used))
    if used:
        section = _section(config, used)
        if used == "fsdp_config":
            version = section.get("fsdp_version", section.get("version"))
            translation.blocks, translation.state_dict = (), "sharded" if str(version) == "2" else "full"
        else:
            section = {"zero_stage": 2, **section}  # Accelerate's default
        read_section(section, rules_of("accelerate", used), translation, name=used)
    if mesh := _section(config, "parallelism_config"):
        rules = rules_of("accelerate", "parallelism_config")
        read_section(mesh, rules, translation, name="parallelism_config")
        if used == "fsdp_config":
            names = ("dp_shard", "cp", "dp_replicate", "sp")
            _set_mesh(translation, *(mesh.get(f"parallelism_config_{name}_size") for name in names))
    sections = (used, "parallelism_config")
    above = {key: value for key, value in config.items() if value != {} and key not in sections}
    read_section(above, rules_of("accelerate", "config"), translation)
    return translation


def _set_mesh(translation: Translation, *sizes: Any) -> None:
    shard, context, copies, sp = (whole_number(size) or 1 for size in sizes)
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
    section = _section(config, "fsdp_config")
    above = {
        key: config[key] for key in config if key in rules or "fsdp" in str(key) or "parallel" in str(key)
    }
    options = above.pop("fsdp", None)
    if not options and not (section and ("fsdp" not in config or "base_model" in config)):
        words = "DistributedDataParallel: neither fsdp nor deepspeed is set"
        row = Row("fsdp", options, words, True, rules["fsdp"][0].source)
        translation = Translation("transformers", ddp=True, rows=[row])
        read_section(above, rules, translation)
        return translation
    translation = Translation("transformers", state_dict="full")
    if "fsdp" in config:
        read_section({"fsdp": options}, rules, translation)
    above.pop("fsdp_config", None)
    # Accelerate's float32 weights are there with its mixed precision, not with a policy alone; axolotl's own
    # `fsdp2_prepare_model` leaves them out
    version = section.get("version", section.get("fsdp_version", config.get("fsdp_version")))
    mixed = any(str(config.get(name)).lower() in ("true", "auto") for name in ("bf16", "fp16", "fp8"))
    translation.masters = mixed and not ("base_model" in config and str(version) == "2")
    read_section(section, _trainers_rules(), translation, name=name, beside={"fsdp_version": version})
    read_section(above, rules, translation)
    sizes = [config.get(f"{name}_size", 1) for name in ("dp_shard", "context_parallel", "dp_replicate")]
    if translation.tensor_parallel > 1 or sizes != [1, 1, 1]:
        _set_mesh(translation, *sizes, 1)
    return translation


def _composer(config: Mapping[str, Any]) -> Translation:
    """Translate Composer's parallelism_config or LLM Foundry's fsdp_config, and `precision`."""
    config, rules = _training(config), rules_of("composer", "config")
    others, name = _section(config, "parallelism_config"), "fsdp_config"
    if config.get(name) is None:
        if not others:
            words = "DistributedDataParallel: nothing is sharded"
            row = Row(name, None, words, True, rules["precision"][0].source)
            return Translation("Composer", ddp=True, rows=[row])
        if "fsdp" not in others:
            raise TranslationError(f"parallelism_config: expected a section 'fsdp', found {shown(others)}")
        others = {key: value for key, value in others.items() if key != "fsdp"}
        name = "parallelism_config.fsdp"
    translation = Translation("Composer", state_dict="full")  # Composer's default
    section = {"mixed_precision": "DEFAULT", **_section(config, name)}
    read_section(section, rules_of("composer", "fsdp_config"), translation, name=name, beside=config)
    tensor = rules_of("composer", "parallelism_config")
    read_section(others, tensor, translation, name="parallelism_config")
    above = {key: config[key] for key in rules if key in config}  # all else is not about FSDP
    read_section(above, rules, translation)
    return translation


def _deepspeed(config: Mapping[str, Any]) -> Translation:
    translation, name = Translation("DeepSpeed", ddp=True), "zero_optimization"
    read_section(_section(config, name), rules_of("deepspeed", name), translation, name=name)
    precisions = ("bf16", "bfloat16", "fp16")
    above = {key: value for key, value in config.items() if key not in (name, *precisions)}
    for name in precisions:
        section, rules = _section(config, name), rules_of("deepspeed", "precision")
        if str(section.get("enabled")).lower() == "true":
            low = (section.get(f"{kind}_master_weights_and_grads") for kind in ("bf16", "fp16"))
            translation.masters = not any(str(on).lower() == "true" for on in low)
        read_section(section, rules, translation, name=name, beside={**above, "section": name})
    read_section(above, rules_of("deepspeed", "config"), translation)
    return translation
