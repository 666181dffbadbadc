"""Finds the messages of messages.yaml in a pasted traceback or in the log of a job."""

import functools
import re
from pathlib import Path
from typing import Any, NamedTuple

import yaml

TABLES = [Path(__file__).with_name(name) for name in ("messages.yaml", "questions.yaml")]
MOST_CHARACTERS = 4_000_000  # of a log: more is cut off at its start, as errors stand at the end
_GAP = ".{0,400}?"  # what … may stand for
_COLORS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\[[0-9;]{1,8}m")  # a forum may have dropped the escape
# what stands before a line: [rank0]:, rank3:, [default0]:, 0: (srun), (Worker pid=12, ip=…), > of a quote
_PREFIX = re.compile(
    r"^[ \t]*(?:(?:>|stderr:|\[(?:rank|default)?\d+\][:>]?|rank ?\d+:|\d{1,4}: |\([\w.:]+ pid=\d+[^)\n]*\))"
    r"[ \t]?)+",
    re.IGNORECASE | re.MULTILINE,
)
_DROPPED = re.compile(r"[\s\"'`‘’“”\\│]+")  # noqa: RUF001  wrapped lines and quotes that a forum has changed


class Answer(NamedTuple):
    """A message that was found, and what to do."""

    id: str  #: the entry's name, and its heading on the page "Answers"
    message: str  #: as raised; … stands for what varies, # for a number
    of: str  #: who raises it
    means: str  #: what it says, in a sentence
    cause: str
    cure: str
    lesson: int  #: the number of the lesson that explains it
    code: str = ""  #: the cure in code
    warns: bool = False  #: whether it is a warning only
    follows: bool = False  #: whether it is mostly the consequence of an error on another rank

    def __str__(self) -> str:
        code = "".join(f"    {line}\n" for line in self.code.splitlines())
        return (
            f"{self.id} ({self.of})\nMessage: {self.message}\n"
            f"Means:   {self.means}\nCause:   {self.cause}\n"
            f"Cure:    {self.cure}\n{code}"
            f"Lesson:  {self.lesson}, and notebooks/answers.md#{self.id}"
        )


@functools.cache
def table() -> dict[str, Any]:
    """Return the tables as one, with the keys `messages` and `questions`.

    Example::

        print(len(table()["messages"]) > 100)  # True
    """
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the one in C is ten times as fast
    return yaml.load("".join(file.read_text(encoding="utf-8") for file in TABLES), loader)


def explain(text: str, *, perhaps: bool = False) -> list[Answer]:
    """Find the known messages in a traceback or log.

    Args:
        text: As pasted: colors, rank prefixes and wrapped lines do not matter.
        perhaps: Find messages that other programs raise, too, without a sign that FSDP is in use.

    Returns:
        What was found, the most specific message first and consequences of another rank's error last; empty
        where no message is known.

    Example::

        for answer in explain("ValueError: Cannot flatten integer dtype tensors")[:1]:
            print(answer.cure)
    """
    text = _COLORS.sub("", text[-MOST_CHARACTERS:])
    whole, text = _normal(text), _normal(_PREFIX.sub("", text))
    found = []
    for entry, pattern, near, letters in _patterns():
        is_near = perhaps or not near or any(word in whole for word in near)
        if not is_near or any(part not in text for part in letters):
            continue
        if match := pattern.search(text):
            answer = Answer(**{key: entry[key] for key in entry.keys() & set(Answer._fields)})
            rank = answer.follows, answer.warns, -sum(map(len, letters)), not near, match.start()
            found.append((rank, answer))
    kept: list[Answer] = []
    for _, answer in sorted(found, key=lambda one: one[0]):
        if not any(_is_part(answer.message, one.message) for one in kept):
            kept.append(answer)
    return kept


def explained_in_a_line(text: str) -> str:
    """Return one line that names the entry of an error's text, or "" where there is none.

    Example::

        line = explained_in_a_line("ValueError: Cannot flatten integer dtype tensors")
        print(line.split(" in ")[0])  # Explained: cannot-flatten-integer-dtype
    """
    if not (found := explain(text)):
        return ""
    first, cure = found[0], found[0].cure.split(". ")[0].removesuffix(".")
    return f"Explained: {first.id} in notebooks/answers.md, lesson {first.lesson}. {cure}."


def _is_part(message: str, of: str) -> bool:
    """Say whether a message is a part of a more specific one."""
    return all(any(word in part for part in _parts(of)) for word in _parts(message))


def _normal(text: str) -> str:
    return _DROPPED.sub("", text).lower()


def _parts(message: str) -> list[str]:
    return [part for part in map(_normal, re.split("[…#]", message)) if part]


@functools.cache
def _patterns() -> list[tuple[dict[str, Any], re.Pattern[str], list[str], list[str]]]:
    """Return each wording of an entry: its pattern, words of which one must be near, its fixed parts."""
    found = []
    for entry in table()["messages"]:
        near = [_normal(word) for word in entry.get("near", [])]
        for wording in [entry["message"], *entry.get("also", [])]:
            escaped = re.escape(_normal(wording.strip("…"))).replace("…", _GAP).replace(r"\#", r"\d+")
            found.append((entry, re.compile(escaped), near, _parts(wording)))
    return found
