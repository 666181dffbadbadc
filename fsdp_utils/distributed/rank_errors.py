"""Sends exceptions from one process to another, with their tracebacks."""

import pickle
import traceback
from contextlib import suppress

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
    try:
        error = pickle.loads(body)
    except KeyboardInterrupt:
        raise
    except BaseException:  # unpickling runs the caller's code, which may raise SystemExit as well
        error = None
    if not isinstance(error, Exception):  # SystemExit and its like would end this process, quietly
        error = RuntimeError(f"{where}: {summary}")
    error.__cause__ = RankTraceback(f"{where}\n\n{text}")
    add_note = getattr(error, "add_note", None)  # Python 3.10 has none
    if add_note and (line := explained_in_a_line(text)):
        add_note(line)
    return error
