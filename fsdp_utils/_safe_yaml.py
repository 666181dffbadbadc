"""YAML that somebody else wrote, with limits on its size, its depth and the expansion of its aliases.

`yaml.safe_load` constructs no foreign classes, but an alias costs a few characters and stands for as much as
anybody likes: 628 bytes can stand for gigabytes as soon as their value is printed, copied or compared.
"""

from typing import Any

from fsdp_utils._extras import need

MOST_CHARACTERS = 256 * 1024  # a configuration has some thousand
MOST_EXPANDED = 1024 * 1024  # characters, with each alias replaced by its value
MOST_DEPTH = 50  # lists and mappings within each other


class YamlError(ValueError):
    """A document that cannot be read: names the place, what was found, and what to do.

    Attributes:
        is_syntax: Whether it breaks YAML's syntax, rather than a limit of this module.
    """

    is_syntax = False


def load_yaml(text: str, *, where: str) -> object:
    """Return the value of a YAML document, as yaml.safe_load does.

    Args:
        text: The document.
        where: Its name in errors, such as the file's.

    Raises:
        YamlError: The text is not YAML, has a key twice, or is larger than a configuration can be.
        ModuleNotFoundError: PyYAML is not installed; says how to install it.
    """
    yaml = need("yaml", "notebooks")
    if len(text) > MOST_CHARACTERS:
        raise YamlError(
            f"{where}: expected YAML of at most {MOST_CHARACTERS:,} characters, found {len(text):,}. "
            "Is it the file that was meant?"
        )
    try:
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()  # no value is constructed before its size is known
    except (yaml.YAMLError, UnicodeError) as error:
        refused = YamlError(f"{where}: expected YAML, found an error: {error}")
        refused.is_syntax = True
        raise refused from error
    except RecursionError as error:
        raise _too_deep(where) from error
    if node is None:
        return None
    _measure(node, where, {}, MOST_DEPTH)
    try:
        return loader.construct_document(node)
    except Exception as error:  # its constructors raise ValueError for a date, AttributeError, KeyError ...
        raise YamlError(
            f"{where}: expected plain YAML, found a value that cannot be read: {error}"
        ) from error


def _measure(node: Any, where: str, sizes: dict[int, int | None], depth: int) -> int:
    """Return the characters of a node with its aliases replaced; sizes: by id, None while being measured."""
    here = f"{where}, line {node.start_mark.line + 1}"
    if id(node) in sizes:
        size = sizes[id(node)]
        if size is None:
            raise YamlError(f"{here}: expected values that end, found one within itself. Write it out.")
        return size
    if isinstance(node.value, str):
        return 1 + len(node.value)
    if not depth:
        raise _too_deep(here)
    sizes[id(node)], size, keys = None, 1, set()
    for child in node.value:  # a mapping's children are pairs of nodes
        parts = child if isinstance(child, tuple) else (child,)
        size += sum(_measure(part, where, sizes, depth - 1) for part in parts)
        if size > MOST_EXPANDED:
            raise YamlError(
                f"{here}: expected at most {MOST_EXPANDED:,} characters with all aliases (*name) replaced by "
                "their values, found more. Write out what is needed."
            )
        if len(parts) == 2 and isinstance(key := parts[0].value, str) and key != "<<":
            if key in keys:  # PyYAML would keep the last value silently
                raise YamlError(
                    f"{where}, line {parts[0].start_mark.line + 1}: expected each key once in a section, "
                    f"found {key[:100]!r} again. Leave one out."
                )
            keys.add(key)
    sizes[id(node)] = size
    return size


def _too_deep(here: str) -> YamlError:
    return YamlError(
        f"{here}: expected lists and mappings at most {MOST_DEPTH} deep, found more. "
        "No configuration is so deep: check the file."
    )
