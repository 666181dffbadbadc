"""Reading YAML that somebody else wrote: limits on its size, its depth and on what its aliases expand to.

`yaml.safe_load` constructs no foreign classes, but an alias costs a few characters and stands for as much as
anybody likes: 628 bytes can stand for gigabytes as soon as their value is printed, copied or compared.
"""

from collections.abc import Iterator
from typing import Any

from fsdp_utils._extras import need

__all__ = ["YamlError", "check_yaml", "load_yaml"]

MOST_CHARACTERS = 256 * 1024  # of a document; a configuration has some thousand
MOST_EXPANDED = 1024 * 1024  # characters, with each alias replaced by what it stands for
MOST_DEPTH = 50  # of lists and mappings within each other


class YamlError(ValueError):
    """This is no YAML that can be read: names the place, what was found, and what to do.

    Attributes:
        is_syntax: it is no YAML at all, as against one that is too large, too deep or expands too far.
    """

    is_syntax = False


def load_yaml(text: str, *, where: str) -> object:
    """The value of a YAML document, as yaml.safe_load returns it.

    Args:
        text: the document.
        where: what errors call it: the file's name.

    Raises:
        YamlError: it is no YAML, or larger than a configuration can be.
        ModuleNotFoundError: PyYAML is not installed; says how to install it.
    """
    check_yaml(text, where=where)
    yaml = need("yaml", "notebooks")
    try:
        return yaml.load(text, Loader=_loader(yaml))
    except (
        Exception
    ) as error:  # of safe_load's constructors: ValueError for a date, AttributeError, KeyError ...
        raise YamlError(
            f"{where}: expected plain YAML, found a value that cannot be read: {error}"
        ) from error


def check_yaml(text: str, *, where: str) -> None:
    """Refuse what is no YAML, and what would take more time or memory than a configuration should.

    No value is constructed: aliases are counted as what they stand for. For parsers other than `load_yaml`.

    Raises:
        YamlError, ModuleNotFoundError: as load_yaml.
    """
    yaml = need("yaml", "notebooks")
    if len(text) > MOST_CHARACTERS:
        raise YamlError(
            f"{where}: expected YAML of at most {MOST_CHARACTERS:,} characters, found {len(text):,}. "
            "Is it the file that was meant?"
        )
    try:
        _measure(yaml, yaml.parse(text, Loader=_loader(yaml)), where)
    except (yaml.YAMLError, UnicodeError) as error:
        refused = YamlError(f"{where}: expected YAML, found what is none: {error}")
        refused.is_syntax = True
        raise refused from error


def _measure(yaml: Any, events: Iterator[Any], where: str) -> None:
    """Go through the parser's events and count characters, with each alias as what it stands for."""
    sizes = [0]  # of the document, and of the collections that are open
    anchors: list[str | None] = [None]  # their names
    known: dict[str, int] = {}
    keys: list[set[str] | None] = [None]  # of the mappings that are open; None for a list
    counts = [0]  # of keys and values that each has so far
    for event in events:
        line = event.start_mark.line + 1
        if isinstance(event, yaml.NodeEvent):
            section, is_key = keys[-1], counts[-1] % 2 == 0
            counts[-1] += 1
            if section is not None and is_key and isinstance(event, yaml.ScalarEvent):
                if event.value in section and event.value != "<<":  # PyYAML would keep the last silently
                    raise YamlError(
                        f"{where}, line {line}: expected each key once in a section, found "
                        f"{event.value[:100]!r} again. Leave out the one that is not meant."
                    )
                section.add(event.value)
        if isinstance(event, yaml.CollectionStartEvent):
            sizes.append(1)
            anchors.append(event.anchor)
            keys.append(set() if isinstance(event, yaml.MappingStartEvent) else None)
            counts.append(0)
        elif isinstance(event, yaml.CollectionEndEvent):
            size, anchor = sizes.pop(), anchors.pop()
            keys.pop()
            counts.pop()
            if anchor is not None:
                known[anchor] = size
            sizes[-1] += size
        elif isinstance(event, yaml.ScalarEvent):
            if event.anchor is not None:
                known[event.anchor] = 1 + len(event.value)
            sizes[-1] += 1 + len(event.value)
        elif isinstance(event, yaml.AliasEvent):
            if event.anchor in anchors:
                raise YamlError(
                    f"{where}, line {line}: expected values that end, found *{event.anchor} within itself. "
                    "Write the value out."
                )
            sizes[-1] += known.get(event.anchor, 0)  # an unknown one is an error when it is composed
        if len(sizes) - 1 > MOST_DEPTH:
            raise YamlError(
                f"{where}, line {line}: expected lists and mappings at most {MOST_DEPTH} deep, found more. "
                "No configuration is so deep: check the file."
            )
        if sum(sizes) > MOST_EXPANDED:
            raise YamlError(
                f"{where}, line {line}: expected at most {MOST_EXPANDED:,} characters with all aliases "
                "(*name) replaced by what they stand for, found more. Write out what is needed of it."
            )


def _loader(yaml: Any) -> Any:
    return getattr(
        yaml, "CSafeLoader", yaml.SafeLoader
    )  # in C where PyYAML was built with it: ten times faster
