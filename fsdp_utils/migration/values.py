"""The values of a config: copied into Python's own types within limits, shown in messages, refused."""

from collections.abc import Mapping, Set
from typing import Any

MOST_VALUES = 10_000  # in a config, each alias counted as what it stands for; real ones have a few hundred
MOST_CHARACTERS = 1024 * 1024  # of all its texts together
MOST_DEPTH = 50  # of lists and sections within each other
MOST_SHOWN = 400  # characters of a value in a message


class TranslationError(ValueError):
    """A config that cannot be translated: names the key, what was expected and what was found.

    Example::

        try:
            translate({"zero_optimization": {"stage": 4}})
        except TranslationError as error:
            print(error)  # zero_optimization.stage: expected 0, 1, 2 or 3, found 4
    """


def shown(value: Any) -> str:
    """A value of a config for a message: quoted, on one line, and cut where it is long."""
    text = repr(value)
    return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}..."


def elsewhere(name: str, value: Any) -> TranslationError:
    """The error for settings in another file: which one is meant depends on where the training starts."""
    return TranslationError(
        f"{name}: expected the settings themselves, found the name of another file, {shown(value)}. "
        "Translate that file: it holds them"
    )


def named(key: Any) -> str:
    """A key of a config for a message: as it is where it is a plain name, otherwise quoted."""
    return key if isinstance(key, str) and key.isidentifier() and len(key) <= 100 else shown(key)


class _Copier:
    """Copies one config, and counts what it has copied."""

    def __init__(self, where: str) -> None:
        self.where, self.values, self.characters = where, 0, 0

    def copy(self, value: Any, depth: int = 1) -> Any:
        self.values += 1
        if isinstance(value, str | bytes):
            self.characters += len(value)
        within = self.values + (len(value) if isinstance(value, Mapping | list | tuple | Set) else 0)
        if within > MOST_VALUES or self.characters > MOST_CHARACTERS:
            raise TranslationError(
                f"{self.where}: expected at most {MOST_VALUES:,} values and {MOST_CHARACTERS:,} characters, "
                "found more (what several keys share counts for each). Is it the config that you meant?"
            )
        # the methods of the built-in types themselves: a subclass may have replaced them
        if isinstance(value, bool) or value is None:
            return value
        if isinstance(value, int):
            if int.bit_length(value) > 64:
                raise TranslationError(
                    f"{self.where}: expected whole numbers of at most 64 bits, found a larger one"
                )
            return int.__int__(value)
        if isinstance(value, float):
            return float.__float__(value)
        if isinstance(value, str):
            return str.__str__(value)
        if isinstance(value, Mapping | list | tuple | Set):
            return self._copy_container(value, depth)
        return value

    def _copy_container(self, value: Any, depth: int) -> Any:
        if depth > MOST_DEPTH:
            raise TranslationError(
                f"{self.where}: expected sections and lists at most {MOST_DEPTH} deep, found more. "
                "Does one hold itself?"
            )
        if isinstance(value, Mapping):
            return {self.copy(key, depth + 1): self.copy(item, depth + 1) for key, item in value.items()}
        kind = list if isinstance(value, list) else tuple if isinstance(value, tuple) else frozenset
        return kind(self.copy(item, depth + 1) for item in value)


def plain_copy(config: Any, where: str) -> Any:
    """Copy a config into dicts, lists, tuples, sets, texts and numbers of Python's own types.

    A subclass of `int`, such as an IntEnum, prints as it likes; the numbers go into the code that is written.

    Args:
        config: the settings. A value that several keys share counts once for each.
        where: what the message calls it.

    Raises:
        TranslationError: too many values, too deep (or within itself), too long, or a number beyond 64 bits.
    """
    return _Copier(where).copy(config)
