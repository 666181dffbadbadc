"""Reading a section of a config key by key: no key is passed over, no value is guessed."""

import difflib
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

from fsdp_utils.migration.errors import TranslationError, named, shown
from fsdp_utils.migration.translation import Row, Translation

DTYPES = {
    "no": "float32",
    "fp32": "float32",
    "float32": "float32",
    "bf16": "bfloat16",
    "bfloat16": "bfloat16",
    "fp16": "float16",
    "float16": "float16",
}


class Same(str):
    """What to write instead of a setting."""


class Lost(str):
    """Why nothing can be written instead of it."""


Words = Same | Lost


class Key(NamedTuple):
    """What to do with a key: `read(value, translation)` notes it and returns what to write instead."""

    read: Callable[[Any, Translation], Words]
    source: str


def read_section(
    section: Any, keys: Mapping[str, Key], translation: Translation, *, name: str = "", framework: str
) -> None:
    """Give each key of a section to what reads it, and note what came of it.

    Args:
        section: the settings.
        keys: all keys that the section may have, in the order in which they are read.
        translation: where settings and rows are put.
        name: of the section, "" for the config itself.
        framework: whose section it is, for the error.

    Raises:
        TranslationError: a key is unknown, or its value is none of those that it may have.
    """
    if not isinstance(section, Mapping):
        raise TranslationError(f"{name}: expected a section with keys, found {shown(section)}")
    prefix = f"{name}." if name else ""
    for key in section:
        if key not in keys:
            close = ", ".join(difflib.get_close_matches(str(key)[:100], keys, n=3) or sorted(keys))
            raise TranslationError(
                f"{prefix}{named(key)}: expected a key of {framework}, such as {close}, found {shown(key)}"
            )
    for key, (read, source) in keys.items():
        if key in section:
            try:
                words = read(section[key], translation)
            except TranslationError as error:
                raise TranslationError(f"{prefix}{key}: {error}") from None
            row = Row(f"{prefix}{key}", section[key], str(words), isinstance(words, Same), source)
            translation.rows.append(row)


def fixed(words: Words, source: str) -> Key:
    """A key of which the same is to be said, whatever its value."""
    return Key(lambda value, translation: words, source)


def if_on(words: Words, source: str) -> Key:
    """A switch of which something is to be said only when it is on."""
    return Key(lambda value, translation: words if is_on(value) else Same("nothing: it is off"), source)


def is_on(value: Any) -> bool:
    """A switch, which some files write as text."""
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    raise TranslationError(f"expected true or false, found {shown(value)}")


def number(value: Any) -> int:
    """A whole number."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    raise TranslationError(f"expected a whole number, found {shown(value)}")


def at_least_one(value: Any) -> int:
    """A number of ranks."""
    if number(value) < 1:
        raise TranslationError(f"expected a whole number from 1 on, found {shown(value)}")
    return value


def only(section: Mapping[Any, Any], keys: Collection[str]) -> None:
    """Refuse a key of a small section that is none of these."""
    if unknown := [shown(key) for key in section if key not in keys]:
        raise TranslationError(
            f"expected keys among {', '.join(sorted(keys))}, found {', '.join(unknown[:20])}"
        )


def one_of(value: Any, names: tuple[str, ...]) -> str:
    """The value in upper case, if it is one of the names."""
    if str(value).upper() not in names:
        raise TranslationError(f"expected one of {', '.join(names)}, found {shown(value)}")
    return str(value).upper()


def dtype(value: Any) -> str:
    """PyTorch's name for the dtype that a framework calls so."""
    if not isinstance(value, str) or value not in DTYPES:
        raise TranslationError(f"expected one of {', '.join(DTYPES)}, found {shown(value)}")
    return DTYPES[value]
