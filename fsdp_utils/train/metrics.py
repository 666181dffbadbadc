"""The logs of a run. Rank 0 writes them; all ranks call.

`metrics.jsonl` has one line for each logged step, as if the run had never been interrupted; `events.jsonl`
keeps what happened to the run. On a full disk, lines wait in memory until there is room.
"""

import contextlib
import json
import math
import sys
import time
from pathlib import Path
from typing import Any

from fsdp_utils.distributed.identity import get_rank
from fsdp_utils.train.config import ConfigError


def _say(text: str) -> None:
    with contextlib.suppress(OSError):  # stderr may be a file on the full disk
        print(text, file=sys.stderr, flush=True)


class RunLog:
    """Writes the logs of a run, which resumes from `step`: later lines and its evaluation are made again."""

    def __init__(self, directory: Path, step: int) -> None:
        self._active = get_rank() == 0
        if self._active:
            self._metrics = _Lines(directory / "metrics.jsonl", step)
            self._events = _Lines(directory / "events.jsonl")

    def metrics(self, step: int, **values: float | None) -> None:
        """Write a line about a step, without what is None; null for NaN and infinity, which JSON lacks."""
        known = {name: value for name, value in values.items() if value is not None}
        if self._active and known:
            as_json = {name: value if math.isfinite(value) else None for name, value in known.items()}
            self._metrics.write({"step": step, **as_json})
            self.say(f"step {step}: {', '.join(f'{name} {value:.4g}' for name, value in known.items())}")

    def event(self, event: str, **values: Any) -> None:
        """Write what happened to the run, with the time."""
        if self._active:
            self._events.write({"event": event, "time": round(time.time(), 3), **values})

    def say(self, text: str) -> None:
        """Print a line on stderr."""
        if self._active:
            _say(text)

    def close(self) -> None:
        """Write what is left. Lines for which there is still no room go to stderr."""
        if self._active:
            self._metrics.close()
            self._events.close()


class _Lines:
    """A file of JSON lines. Lines that cannot be written are retried with the next."""

    def __init__(self, path: Path, until: int | None = None) -> None:
        self._path = path
        self._waiting = b""  # it may begin within a line, whose first part is in the file
        self._has_warned = False
        length = _length(path, until) if path.exists() else 0
        self._file = path.open("ab", buffering=0)
        self._file.truncate(length)

    def write(self, line: dict[str, Any]) -> None:
        self._waiting += json.dumps(line).encode() + b"\n"
        self._flush()

    def _flush(self) -> None:
        try:
            while self._waiting:
                self._waiting = self._waiting[self._file.write(self._waiting) :]
        except OSError as error:
            if not self._has_warned:
                _say(f"{self._path}: {error.strerror}; the run goes on, its lines wait for room")
            self._has_warned = True

    def close(self) -> None:
        self._flush()
        if self._waiting:
            _say(f"{self._path}: never written: {self._waiting.decode()}")
        with contextlib.suppress(OSError):
            self._file.close()


def _length(path: Path, until: int | None) -> int:
    """Count the bytes of the complete lines; with `until`, of those before that step's evaluation."""
    length = 0
    for number, line in enumerate(path.read_bytes().splitlines(keepends=True), 1):
        if not line.endswith(b"\n"):
            break
        if until is not None:
            try:
                values = json.loads(line)
                if (values["step"], "eval_loss" in values) >= (until, True):
                    break
            except (ValueError, KeyError, TypeError):
                raise ConfigError(
                    f'{path}: expected lines of JSON with "step", line {number} is not. Move the file away.'
                ) from None
        length += len(line)
    return length
