"""The logs of a run: metrics, events, TensorBoard, a progress bar. Rank 0 writes; all ranks call.

`metrics.jsonl` has one line for each logged step, as if the run had never been interrupted: lines of steps
after the checkpoint that a run resumes from are removed, as those steps are trained again. `events.jsonl`
lists what happened, and nothing is ever removed from it.

A full disk does not end a run here: its lines are kept in memory and written when there is room again.
"""

import contextlib
import json
import math
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fsdp_utils._extras import need
from fsdp_utils.distributed.identity import get_rank

__all__ = ["RunLog"]


class RunLog:
    """Writes the logs of a run.

    Args:
        directory: the run's.
        step: the step that the run resumes from: 0, or that of its checkpoint.
        steps: the run's last.
        tensorboard: write for TensorBoard, too.
    """

    def __init__(self, directory: Path, *, step: int, steps: int, tensorboard: bool) -> None:
        self._active = get_rank() == 0
        if not self._active:
            return
        tqdm = need("tqdm", "train").tqdm

        directory.mkdir(parents=True, exist_ok=True)
        self._bar = tqdm(total=steps, initial=step, unit="step", disable=None)  # only in a terminal
        self._metrics = _Lines(directory / "metrics.jsonl", "step", self.say, until=step)
        self._events = _Lines(directory / "events.jsonl", "event", self.say)
        self._writer: Any = None
        if tensorboard:
            need("tensorboard", "train")
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(directory / "tensorboard"), purge_step=step + 1)

    def has(self, name: str) -> bool:
        """Has metrics.jsonl this value of the step that the run resumes from? To be called on rank 0."""
        return name in self._metrics.known

    def metrics(self, step: int, **values: float | None) -> None:
        """A line about a step. What is None is left out; NaN and infinity, which JSON lacks, become null."""
        known = {name: value for name, value in values.items() if value is not None}
        if not self._active or not known:
            return
        as_json = {name: value if math.isfinite(value) else None for name, value in known.items()}
        self._metrics.write({"step": step, **as_json})
        self._to_tensorboard(lambda writer: [writer.add_scalar(*pair, step) for pair in known.items()])
        text = ", ".join(f"{name} {value:.4g}" for name, value in known.items())
        if self._bar.disable:
            self.say(f"step {step}: {text}")
        else:
            self._bar.set_postfix_str(text)

    def event(self, event: str, **values: Any) -> None:
        """Something that happened to the run, with the time."""
        if self._active:
            self._events.write({"event": event, "time": round(time.time(), 3), **values})
            if event in ("stopped", "failed to save"):
                self.say(f"{event}: {values}")

    def progress(self, step: int) -> None:
        """Move the progress bar to this step."""
        if self._active:
            self._bar.update(step - self._bar.n)

    def say(self, text: str) -> None:
        """Print a line on stderr, above the progress bar."""
        if self._active:
            with contextlib.suppress(OSError):  # it may go to a file on the full disk
                self._bar.write(text, file=sys.stderr)

    def durable(self) -> None:
        """Flush to the disk, so that a checkpoint never has steps that the metrics lack."""
        if self._active:
            self._metrics.durable()

    def close(self) -> None:
        """Write what is left. Lines for which there is still no room go to stderr."""
        if self._active:
            self._bar.close()
            self._to_tensorboard(lambda writer: writer.close())
            self._metrics.close()
            self._events.close()

    def _to_tensorboard(self, write: Callable[[Any], object]) -> None:
        if self._writer is None:
            return
        try:
            write(self._writer)
        except OSError as error:  # of its thread, which has ended by it
            self._writer = None
            self.say(f"TensorBoard gets no more metrics of this start: {error}; metrics.jsonl has them all")


class _Lines:
    """A file to which lines are appended. Lines that cannot be written are retried with the next.

    An incomplete last line is removed. A file with lines that no run has written is renamed, so that nothing
    of it is lost; the lines of it that can be read begin a new file.

    Args:
        path: the file.
        key: what each line begins with: "step" or "event".
        say: prints a line.
        until: lines of later steps are removed.
    """

    def __init__(self, path: Path, key: str, say: Callable[[str], None], until: int | None = None) -> None:
        self._path, self._say = path, say
        self.known: set[str] = set()  # the names in the lines of step `until`
        self._waiting = b""  # it may begin within a line, whose first part is in the file
        self._has_warned = False
        if path.exists():
            self._resume(key, until)
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        self._try(self._flush)

    def _resume(self, key: str, until: int | None) -> None:
        *lines, cut_short = self._path.read_bytes().split(b"\n")
        start = b'{"%s": ' % key.encode()
        found = [(line, _parsed(line, key)) for line in lines]
        broken = [number for number, (_, values) in enumerate(found, 1) if values is None]
        if not start.startswith(cut_short[: len(start)]):
            broken.append(len(lines) + 1)
        kept = []
        for line, values in found:
            if values is None:
                continue
            if until is not None and values["step"] > until:
                break
            if until is not None and values["step"] == until:
                self.known |= values.keys()
            kept.append(line + b"\n")
        if not broken:
            os.truncate(self._path, sum(map(len, kept)))  # takes no room on the disk
            return
        aside = self._path.with_name(f"{self._path.name}.damaged-{time.time_ns()}")
        self._path.rename(aside)
        self._waiting = b"".join(kept)
        self._say(
            f'{self._path}: expected each line to be JSON with "{key}", line {broken[0]} is not. The file is '
            f"now {aside.name}; a new one begins with the {len(kept)} lines that can be read"
        )

    def write(self, line: dict[str, Any]) -> None:
        self._waiting += json.dumps(line).encode() + b"\n"
        self._try(self._flush)

    def durable(self) -> None:
        self._try(self._flush)
        self._try(lambda: os.fsync(self._file))

    def close(self) -> None:
        self._try(self._flush)
        if self._waiting:
            self._say(f"{self._path}: never written: {self._waiting.decode()}")
        self._try(lambda: os.close(self._file))

    def _flush(self) -> None:
        while self._waiting:
            self._waiting = self._waiting[os.write(self._file, self._waiting) :]

    def _try(self, act: Callable[[], None]) -> None:
        try:
            act()
        except OSError as error:
            if not self._has_warned:  # once in a start
                self._say(f"{self._path}: {error.strerror}; the run goes on, its lines wait for room")
            self._has_warned = True


def _parsed(line: bytes, key: str) -> dict[str, Any] | None:
    """What a line tells; None where it is not a line of such a file."""
    try:
        values = json.loads(line)
    except (ValueError, RecursionError):
        return None
    kind = int if key == "step" else str
    return values if isinstance(values, dict) and type(values.get(key)) is kind else None
