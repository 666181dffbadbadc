"""Read a config from a file or a dict, with what it takes from elsewhere."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from fsdp_utils.migration.translation import TranslationError, shown

REFERENCE = re.compile(r"\$\{([\w.]+)\}")  # OmegaConf's ${section.key}; ${oc.env:NAME} stays as it is
MOST_ALIASES = 20
MOST_STEPS = 20  # from a reference to a reference


def read_config(config: Any, given: Mapping[str, Any]) -> dict[Any, Any]:
    """Read a config, a file or its settings, into dicts and lists, and fill in what it leaves open."""
    from_file = isinstance(config, str | Path)
    content = _content(Path(config)) if from_file else config
    if not isinstance(content, Mapping):
        where = f"in {Path(config).name}: " if from_file else ""
        raise TranslationError(f"{where}expected a dict of settings, found {type(content).__name__}")
    try:
        content = _plain(content, content)
    except RecursionError:
        raise TranslationError("config: expected sections that end, found one within itself") from None
    for name, value in given.items():
        *path, last = str(name).split(".")
        section = _at(content, path)
        if not isinstance(section, dict) or last not in section:
            raise TranslationError(f"given: expected keys that stand in the config, found {shown(name)}")
        section[last] = value
    return content


def _plain(value: Any, root: Mapping[Any, Any], steps: int = 0) -> Any:
    """Copy settings into dicts and lists, and follow references to other keys of the config."""
    if isinstance(value, Mapping):
        return {key: _plain(item, root, steps) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, root, steps) for item in value]
    if isinstance(value, str) and (name := REFERENCE.fullmatch(value)) and steps < MOST_STEPS:
        found = _at(root, name[1].split("."))
        if found is not None and not isinstance(found, Mapping | list):
            return _plain(found, root, steps + 1)
    return value


def _at(section: Any, path: list[str]) -> Any:
    for name in path:
        section = section.get(name) if isinstance(section, Mapping) else None
    return section


def _content(path: Path) -> Any:
    kind = "JSON" if path.suffix == ".json" else "YAML"
    content = path.read_bytes()
    try:
        return json.loads(content) if kind == "JSON" else _yaml(content)
    except Exception as error:  # PyYAML's constructors raise ValueError, AttributeError, KeyError ...
        told = " ".join(str(error).split())
        raise TranslationError(f"{path.name}: expected {kind}, found what is none: {told:.600}") from None


def _yaml(content: bytes) -> Any:
    class Loader(yaml.SafeLoader):
        aliases = 0

        def compose_node(self, parent: Any, index: Any) -> Any:
            self.aliases += self.check_event(yaml.AliasEvent)
            if self.aliases > MOST_ALIASES:  # a few characters of aliases of aliases can stand for gigabytes
                raise ValueError(f"more than {MOST_ALIASES} aliases (*name) stand in it")
            return super().compose_node(parent, index)

    return yaml.load(content, Loader)
