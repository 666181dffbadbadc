"""Sends exceptions from one process to another, with their tracebacks."""

import pickle
import traceback
from contextlib import suppress
from pathlib import Path

import cloudpickle

finding: Path | None = None  # on a rank of run_on_ranks: for `keep_finding`


class RankTraceback(Exception):
    """The traceback of an exception on another rank; shown as the cause of the one raised here."""


def pack_error(error: BaseException) -> bytes:
    """An exception, caught where this is called, as bytes for another process."""
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
    """The exception, or a RuntimeError with its text; its cause holds the original traceback."""
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
    return error


def keep_finding(error: BaseException | None) -> None:
    """Let run_on_ranks raise this error should its time run out; None takes it back."""
    if finding is not None:
        part = finding.with_suffix(".part")
        with suppress(OSError):  # run_on_ranks has ended, and with it the directory
            part.write_bytes(b"" if error is None else pack_error(error))
            part.replace(finding)


def read_finding(file: Path) -> BaseException | None:
    """Read the error that a rank has kept, if one has."""
    packed = file.read_bytes() if file.exists() else b""
    return unpack_error(packed, "check_in_step") if packed else None
