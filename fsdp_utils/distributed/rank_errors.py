"""Sends exceptions from one process to another, with their tracebacks."""

import pickle
import traceback

import cloudpickle


class RankTraceback(Exception):
    """The traceback of an exception on another rank; shown as the cause of the one raised here."""


def pack_error(error: BaseException) -> bytes:
    """An exception, caught where this is called, as bytes for another process."""
    frames = error.__traceback__
    if frames is not None and frames.tb_next is not None:
        frames = frames.tb_next  # without the frame of our own code that caught it
    text = "".join(traceback.format_exception(type(error), error, frames))
    summary = traceback.format_exception_only(type(error), error)[-1].strip()
    try:
        body = cloudpickle.dumps(error)
    except Exception:
        body = b""
    return pickle.dumps((body, summary, text))


def unpack_error(packed: bytes, where: str) -> BaseException:
    """The exception, or a RuntimeError with its text; its cause holds the original traceback."""
    body, summary, text = pickle.loads(packed)
    try:
        error = pickle.loads(body)
    except KeyboardInterrupt:
        raise
    except BaseException:  # unpickling runs the caller's code, which may raise SystemExit as well
        error = None
    # SystemExit and its like would end this process, quietly, for what happened in another.
    if not isinstance(error, BaseException) or isinstance(
        error, SystemExit | KeyboardInterrupt | GeneratorExit
    ):
        error = RuntimeError(f"{where}: {summary}")
    error.__cause__ = RankTraceback(f"{where}\n\n{text}")
    return error
