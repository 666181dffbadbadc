"""What does a config of Accelerate, Composer or DeepSpeed say in FSDP2?

`translate` reads the config. What it returns holds the settings, the Python to write, and what became of each
key. Nothing is dropped in silence: a setting that FSDP2 has no counterpart for is named, with the reason.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fsdp_utils.migration import accelerate, composer, deepspeed
from fsdp_utils.migration.translation import Row, Translation

__all__ = ["Row", "Translation", "translate"]

READERS = {"accelerate": accelerate, "composer": composer, "deepspeed": deepspeed}


def translate(config: str | Path | Mapping[str, Any], *, framework: str | None = None) -> Translation:
    """What do I write in FSDP2 for what this config asks for?

    Args:
        config: the file (.json, .yaml or .yml) or what is in it: the file of `accelerate config`; a dict with
            Composer's `parallelism_config` or LLM Foundry's `fsdp_config`; DeepSpeed's JSON.
        framework: "accelerate", "composer" or "deepspeed". None: told by the config's keys.

    Returns:
        The settings, with `.code()`, `.rows`, `.without_counterpart` and a table as `str()`.

    Raises:
        ValueError: the framework is unknown or cannot be told; a key or a value is unknown. The message names
            the key, what was expected and what was found.
        TypeError: the config is neither a file nor a dict.

    Source: each row names its own.
    """
    content = _read(config)
    if framework is None:
        framework = _told_by(content)
    if framework not in READERS:
        raise ValueError(f"framework: expected one of {', '.join(map(repr, READERS))}, found {framework!r}")
    return READERS[framework].read(content)


def _read(config: Any) -> Mapping[str, Any]:
    if isinstance(config, str | Path):
        path = Path(config)
        if path.suffix == ".json":
            content = json.loads(path.read_text(encoding="utf-8"))
        elif path.suffix in (".yaml", ".yml"):
            import yaml  # PyYAML comes with the extra [notebooks], with Accelerate and with Composer

            content = yaml.safe_load(path.read_text(encoding="utf-8"))
        else:
            raise ValueError(f"{path.name}: expected a file .json, .yaml or .yml, found {path.suffix!r}")
        where = f"in {path.name}"
    else:
        content, where = config, "as config"
    if not isinstance(content, Mapping):
        raise TypeError(f"{where}: expected a dict of settings, found {type(content).__name__}")
    return content


def _told_by(config: Mapping[str, Any]) -> str:
    matching = [name for name, reader in READERS.items() if reader.is_mine(config)]
    if len(matching) == 1:
        return matching[0]
    raise ValueError(
        "framework: expected a config with the key 'distributed_type' (Accelerate), 'parallelism_config' or "
        "'fsdp_config' (Composer) or 'zero_optimization' (DeepSpeed), found "
        f"{', '.join(map(repr, sorted(config))) or 'no key'}. If it is one of theirs, name it: framework=..."
    )
