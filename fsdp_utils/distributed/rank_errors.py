"""Sends exceptions from one process to another, with their tracebacks."""

import pickle
import traceback
from contextlib import suppress
from typing import Any

import cloudpickle

from fsdp_utils.answers import explained_in_a_line


class RankTraceback(Exception):
    """The traceback of an exception on another rank; shown as the cause of the one raised here."""


def pack_error(error: BaseException) -> bytes:
    """Turn an exception, caught where this is called, into bytes for another process."""
    frames = error.__traceback__
    if frames is not None and frames.tb_next is not None:
        frames = frames.tb_next  # without the frame of our own code that caught it
    text = "".join(traceback.format_exception(type(error), error, frames))
    summary = traceback.format_exception_only(type(error), error)[-1].strip()
    body = b""
    with suppress(Exception):
        body = cloudpickle.dumps(error)
    return pickle.dumps((body, summary, text))


def unpack_error(packed: bytes, where: str) -> BaseException:
    """Return the exception, or a RuntimeError with its text; its cause holds the original traceback.

    The last line of a known error names its entry on the page "Answers".
    """
    body, summary, text = pickle.loads(packed)
    error = None
    with suppress(RuntimeError):
        error = unpickle(body, "the exception")
    if not isinstance(error, Exception):  # SystemExit and its like would end this process, quietly
        error = RuntimeError(f"{where}: {summary}")
    error.__cause__ = RankTraceback(f"{where}\n\n{text}")
    add_note = getattr(error, "add_note", None)  # Python 3.10 has none
    if add_note and (line := explained_in_a_line(text)):
        add_note(line)
    return error


def unpickle(packed: bytes, what: str) -> Any:
    """Unpickle what another process has sent; a RuntimeError says what cannot be read here, and why."""
    try:
        return pickle.loads(packed)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # this runs the sender's code, which may raise SystemExit as well
        raise RuntimeError(f"{what} cannot be read here: {type(error).__name__}: {text_of(error)}") from error


def text_of(value: Any) -> str:
    """`str(value)` as a plain string, also where the value's own `__str__` raises or returns a subclass."""
    try:
        return str.__str__(str(value))
    except BaseException as error:  # the reader's code may raise anything here
        return f"(no text: its __str__ raised {type(error).__name__})"
