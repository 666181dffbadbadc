"""Read a config, tell whose it is, and translate it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fsdp_utils.migration import frameworks
from fsdp_utils.migration.files import read_config
from fsdp_utils.migration.translation import Translation


def translate(
    config: str | Path | Mapping[str, Any], *, given: Mapping[str, Any] | None = None
) -> Translation:
    """Translate a config to FSDP2. The config's keys tell whose it is.

    Args:
        config: the file (.json, .yaml or .yml) or what is in it: the file of `accelerate config`; the
            TrainingArguments of transformers, their `fsdp_config` alone, or axolotl's file; a dict with
            Composer's `parallelism_config` or LLM Foundry's `fsdp_config`; DeepSpeed's JSON.
        given: values that the config leaves open, such as "auto" and OmegaConf's `${...}`, by the names that
            the rows have: {"bf16.enabled": True}. A reference to another key of the config is followed.

    Returns:
        The settings, with `.code()`, `.rows`, `.without_counterpart` and a table as `str()`.

    Raises:
        TranslationError (a ValueError): the config is none of these; the file is no JSON or YAML, or larger
            than a config can be; a value is unknown. The message names the file or the key, what was expected
            and what was found. An unknown key is no error: its row is marked as lost.
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
    return getattr(frameworks, frameworks.framework_of(settings))(settings)
