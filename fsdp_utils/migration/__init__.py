"""Translate a config of Accelerate, transformers, axolotl, Composer or DeepSpeed to FSDP2.

`translate` reads the config. Its result holds the settings, the Python to write, and what became of each key:
a setting without a counterpart in FSDP2 is named, with the reason. The keys are rows of tables/*.json.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fsdp_utils.migration import frameworks
from fsdp_utils.migration.files import read_config
from fsdp_utils.migration.translation import Row, Translation, TranslationError

__all__ = ["Row", "Translation", "TranslationError", "translate"]


def translate(config: str | Path | Mapping[str, Any]) -> Translation:
    """Translate a config to FSDP2. The config's keys tell whose it is.

    Args:
        config: the file (.json, .yaml or .yml) or what is in it: the file of `accelerate config`; the
            TrainingArguments of transformers, their `fsdp_config` alone, or axolotl's file; a dict with
            Composer's `parallelism_config` or LLM Foundry's `fsdp_config`; DeepSpeed's JSON. A reference to
            another key, as OmegaConf's `${variables.precision}`, is followed.

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
    settings = read_config(config)
    return getattr(frameworks, frameworks.framework_of(settings))(settings)
