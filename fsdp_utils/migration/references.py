"""Values that a config takes from elsewhere: OmegaConf's `${...}`, and values that the caller gives."""

import re
from collections.abc import Mapping
from typing import Any

from fsdp_utils.migration.values import MOST_CHARACTERS, MOST_VALUES, TranslationError, shown

REFERENCE = re.compile(r"\$\{([\w.\-\[\]]+)\}")  # ${section.key}; ${oc.env:NAME} stays as it is
MOST_STEPS = 20  # from a reference to a reference


def filled_in(config: dict[Any, Any], given: Mapping[str, Any]) -> dict[Any, Any]:
    """Put in what is given, and what references within the config refer to.

    Args:
        config: the settings; a plain copy, which is changed.
        given: values by the names that the rows have: "bf16.enabled". Each stands in the config.

    Returns:
        The config. A reference to what is not in it stays as it is.

    Raises:
        TranslationError: a name that is given is not in the config.
    """
    for name, value in given.items():
        *path, last = str(name).split(".")
        section = _at(config, path)
        if not isinstance(section, dict) or last not in section:
            raise TranslationError(f"given: expected keys that stand in the config, found {shown(name)}")
        section[last] = value
    return _References(config).resolved(config, [], 0)


class _References:
    """Resolves the references of one config, and counts them."""

    def __init__(self, root: dict[Any, Any]) -> None:
        self.root, self.count = root, 0

    def resolved(self, value: Any, path: list[Any], steps: int) -> Any:
        if isinstance(value, dict):
            return {key: self.resolved(item, [*path, key], steps) for key, item in value.items()}
        if isinstance(value, list):
            return [self.resolved(item, [*path, index], steps) for index, item in enumerate(value)]
        if not isinstance(value, str) or "${" not in value or steps >= MOST_STEPS:
            return value
        if whole := REFERENCE.fullmatch(value):
            return self._referred(whole[1], value, path, steps)
        text = REFERENCE.sub(lambda found: str(self._referred(found[1], found[0], path, steps)), value)
        return text if len(text) <= MOST_CHARACTERS else value

    def _referred(self, name: str, otherwise: str, path: list[Any], steps: int) -> Any:
        """What a reference stands for, if that is no section; a leading dot is the section it stands in."""
        self.count += 1
        if self.count > MOST_VALUES:
            raise TranslationError(f"config: expected at most {MOST_VALUES:,} references, found more")
        parts = name.replace("[", ".").replace("]", "").lstrip(".").split(".")
        dots = len(name) - len(name.lstrip("."))
        found = _at(self.root, [*(path[:-dots] if dots else []), *parts])
        if found is None or isinstance(found, dict | list):
            return otherwise
        return self.resolved(found, path, steps + 1)


def _at(value: Any, path: list[Any]) -> Any:
    for part in path:
        if isinstance(value, list) and str(part).isdecimal() and int(part) < len(value):
            value = value[int(part)]
        elif isinstance(value, dict) and part in value:
            value = value[part]
        else:
            return None
    return value
