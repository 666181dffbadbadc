"""Read a config, tell which framework it is of, and give it to that framework's reader."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fsdp_utils._safe_yaml import YamlError, load_yaml
from fsdp_utils.migration import accelerate, composer, deepspeed, trainer
from fsdp_utils.migration.references import filled_in
from fsdp_utils.migration.translation import Translation
from fsdp_utils.migration.values import TranslationError, plain_copy, shown

MOST_BYTES = 1024 * 1024  # of a file; a config has a few thousand
READERS = {
    "accelerate": accelerate,
    "transformers": trainer,
    "composer": composer,
    "deepspeed": deepspeed,
}


def translate(
    config: str | Path | Mapping[str, Any],
    *,
    framework: str | None = None,
    given: Mapping[str, Any] | None = None,
) -> Translation:
    """Translate a config to FSDP2.

    Args:
        config: the file (.json, .yaml or .yml) or what is in it: the file of `accelerate config`; the
            TrainingArguments of transformers, their `fsdp_config` alone, or axolotl's file; a dict with
            Composer's `parallelism_config` or LLM Foundry's `fsdp_config`; DeepSpeed's JSON.
        framework: "accelerate", "transformers" (axolotl too), "composer" or "deepspeed". None: told by the
            config's keys.
        given: values that the config leaves open, such as "auto" and OmegaConf's `${...}`, by the names that
            the rows have: {"bf16.enabled": True}. A reference to another key of the config is followed.

    Returns:
        The settings, with `.code()`, `.rows`, `.without_counterpart` and a table as `str()`.

    Raises:
        TranslationError (a ValueError): the framework is unknown or cannot be told; the file is no JSON or
            YAML, or larger than a config can be; a value is unknown. The message names the file or the key,
            what was expected and what was found. An unknown key is no error: its row is marked as lost.
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
    content = composer.training(_read(config))
    content = plain_copy(filled_in(dict(content), given or {}), "config")
    if framework is None:
        framework = _told_by(content)
    if not isinstance(framework, str) or framework not in READERS:
        names = ", ".join(map(repr, READERS))
        raise TranslationError(f"framework: expected one of {names}, found {shown(framework)}")
    return READERS[framework].read(content)


def _read(config: Any) -> Mapping[str, Any]:
    if isinstance(config, str | Path):
        path = Path(config)
        content, where = _content(path), path.name
        if not isinstance(content, Mapping):
            raise TranslationError(
                f"in {path.name}: expected a dict of settings, found {type(content).__name__}"
            )
    else:
        content, where = config, "config"
        if not isinstance(content, Mapping):
            raise TypeError(f"as config: expected a dict of settings, found {type(content).__name__}")
    content = plain_copy(content, where)
    return _with_other_files(content, Path(config)) if isinstance(config, str | Path) else content


# settings that may be the name of a JSON file which holds them
OTHER_FILES = (("deepspeed_config", "deepspeed_config_file"), ("deepspeed",), ("fsdp_config",))


def _with_other_files(content: Any, path: Path) -> Any:
    """Put in the JSON files that the config names, where they are found."""
    for *sections, key in OTHER_FILES:
        section = content
        for name in sections:
            section = section.get(name) if isinstance(section, dict) else None
        if not isinstance(section, dict):
            continue
        name = section.get(key)
        if not isinstance(name, str) or not name.endswith(".json"):
            continue
        # the training starts where its names are right: here, or where the config is, or one folder above
        folders = [Path(), path.absolute().parent, path.absolute().parent.parent]
        found = next((folder / name for folder in folders if (folder / name).is_file()), None)
        if found is not None:
            settings = plain_copy(_content(found), found.name)
            section[key] = {"_read_from": str(found), **settings} if isinstance(settings, dict) else settings
    return content


def _content(path: Path) -> Any:
    if path.exists() and not path.is_file():  # to open a pipe would wait for its other end
        raise TranslationError(f"{path}: expected a file, found a folder, a pipe or a device")
    if path.suffix not in (".json", ".yaml", ".yml"):
        raise TranslationError(f"{path}: expected a file .json, .yaml or .yml, found {path.suffix!r}")
    with path.open("rb") as file:
        read = file.read(MOST_BYTES + 1)
    if len(read) > MOST_BYTES:
        raise TranslationError(
            f"{path.name}: expected at most {MOST_BYTES:,} bytes, found more. Is it the config that you "
            "meant?"
        )
    try:
        text = read.decode()
        if path.suffix == ".json":
            return _json(text)
        return load_yaml(text, where=path.name)
    except YamlError as error:
        raise TranslationError(" ".join(str(error).split())) from None  # PyYAML's take several lines
    except (ValueError, RecursionError) as error:
        kind = "JSON" if path.suffix == ".json" else "YAML"
        raise TranslationError(
            f"{path.name}: expected {kind} in UTF-8, found what is none: {error}"
        ) from error


def _json(text: str) -> Any:
    """JSON, with the comments and the last commas that DeepSpeed's parser takes."""
    try:
        return json.loads(text, object_pairs_hook=_without_duplicates)
    except json.JSONDecodeError as error:
        plain = COMMENT.sub(lambda found: found[0] if found[0][0] == '"' else " ", text)
        plain = LAST_COMMA.sub(lambda found: found[1] or "", plain)
        if plain == text:
            raise
        try:
            return json.loads(plain, object_pairs_hook=_without_duplicates)
        except json.JSONDecodeError:
            raise error from None  # its line and column are those of the file


STRING = r'"(?:[^"\\\n]|\\.)*"'
COMMENT = re.compile(rf"{STRING}|/\*.*?\*/|(?://|#)[^\n]*", re.DOTALL)
LAST_COMMA = re.compile(rf"({STRING})|,(?=\s*[}}\]])")


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """JSON's parser would keep the last of two keys without a word."""
    section = dict(pairs)
    if len(section) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {shown(twice)} stands twice in one section")
    return section


def _told_by(config: Mapping[str, Any]) -> str:
    matching = [name for name, reader in READERS.items() if reader.is_mine(config)]
    if len(matching) == 1:
        return matching[0]
    found = ", ".join(shown(key) for key in list(config)[:20]) or "no key"
    raise TranslationError(
        "framework: expected a config with the key 'distributed_type' (Accelerate), 'fsdp' or 'fsdp_config' "
        "(transformers, Composer), 'parallelism_config' (Composer) or 'zero_optimization' (DeepSpeed), found "
        f"{found}. If it is one of theirs, name it: framework=..."
    )
