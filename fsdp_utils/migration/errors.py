"""The one error of a config that cannot be translated, and the limits on what a config may hold."""

from collections.abc import Mapping, Sequence, Set
from typing import Any

MOST_VALUES = 10_000  # in a config, each alias counted as what it stands for; real ones have a few hundred
MOST_CHARACTERS = 1024 * 1024  # of all its texts together
MOST_DEPTH = 50  # of lists and sections within each other
MOST_SHOWN = 400  # characters of a value in a message


class TranslationError(ValueError):
    """A config that cannot be translated: names the key, what was expected and what was found."""


def shown(value: Any) -> str:
    """A value of a config for a message: quoted, on one line, and cut where it is long."""
    text = repr(value)
    return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}..."


def named(key: Any) -> str:
    """A key of a config for a message: as it is where it is a plain name, otherwise quoted."""
    return key if isinstance(key, str) and key.isidentifier() and len(key) <= 100 else shown(key)


def check_size(config: Any, where: str) -> None:
    """Refuse a config that takes more than a config needs when it is printed, copied or compared.

    Args:
        config: the settings. A value that several keys share counts once for each.
        where: what the message calls it.

    Raises:
        TranslationError: too many values, too deep (or within itself), too long, or a number beyond 64 bits.
    """
    values = characters = 0
    left: list[tuple[Any, int]] = [(config, 1)]
    while left:
        value, depth = left.pop()
        values += 1
        if isinstance(value, str | bytes):
            characters += len(value)
        elif isinstance(value, int) and value.bit_length() > 64:
            raise TranslationError(f"{where}: expected whole numbers of at most 64 bits, found a larger one")
        elif isinstance(value, Mapping | Sequence | Set):
            if depth > MOST_DEPTH:
                raise TranslationError(
                    f"{where}: expected sections and lists at most {MOST_DEPTH} deep, found more. "
                    "Does one hold itself?"
                )
            inside = [*value.keys(), *value.values()] if isinstance(value, Mapping) else value
            left.extend((each, depth + 1) for each in inside)
        if values + len(left) > MOST_VALUES or characters > MOST_CHARACTERS:
            raise TranslationError(
                f"{where}: expected at most {MOST_VALUES:,} values and {MOST_CHARACTERS:,} characters, found "
                "more (what several keys share counts for each). Is it the config that you meant?"
            )
