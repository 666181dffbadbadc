"""What a run leaves to read: metrics without a seam, events, TensorBoard, a bar. Rank 0 writes, all call.

`metrics.jsonl` has one line for each logged step, as if the run had never been interrupted: what was written
after the checkpoint that a run goes on from is taken out, as those steps are done again. `events.jsonl` is
what happened, and nothing is ever taken out of it.

A full disk does not end a run here: that is for the checkpoints to decide. Lines wait until there is room.
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

__all__ = ["Journal"]


class Journal:
    """The run's diary.

    Args:
        directory: the run's.
        step: the step that the run goes on from: 0, or that of its checkpoint.
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

    def told(self, name: str) -> bool:
        """Does metrics.jsonl have this already for the step that the run goes on from? Ask on rank 0."""
        return name in self._metrics.told

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

    def moved(self, step: int) -> None:
        """The bar is at this step."""
        if self._active:
            self._bar.update(step - self._bar.n)

    def say(self, text: str) -> None:
        """A line for whoever watches."""
        if self._active:
            with contextlib.suppress(OSError):  # it may go to a file on the full disk
                self._bar.write(text, file=sys.stderr)

    def durable(self) -> None:
        """What was written outlives a power failure: called before a checkpoint that counts on it."""
        if self._active:
            self._metrics.durable()

    def close(self) -> None:
        """Nothing more will be written. Lines for which there still is no room go to stderr."""
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
    """A file that lines are added to. Those that cannot be written now are tried again with the next.

    A last line that was cut short is cut off. A file with lines that are not a run's gets another name, and
    nothing of it is lost; the lines that can be read begin the new one.

    Args:
        path: the file.
        key: what each line begins with: "step" or "event".
        say: tells whoever watches.
        until: lines of later steps are taken out.
    """

    def __init__(self, path: Path, key: str, say: Callable[[str], None], until: int | None = None) -> None:
        self._path, self._say = path, say
        self.told: set[str] = set()  # what the lines of step `until` tell
        self._waiting = b""  # it may begin within a line, whose first part is in the file
        self._said = False
        if path.exists():
            self._go_on(key, until)
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        self._try(self._empty)

    def _go_on(self, key: str, until: int | None) -> None:
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
                self.told |= values.keys()
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
        self._try(self._empty)

    def durable(self) -> None:
        self._try(self._empty)
        self._try(lambda: os.fsync(self._file))

    def close(self) -> None:
        self._try(self._empty)
        if self._waiting:
            self._say(f"{self._path}: never written: {self._waiting.decode()}")
        self._try(lambda: os.close(self._file))

    def _empty(self) -> None:
        while self._waiting:
            self._waiting = self._waiting[os.write(self._file, self._waiting) :]

    def _try(self, act: Callable[[], None]) -> None:
        try:
            act()
        except OSError as error:
            if not self._said:  # once in a start
                self._say(f"{self._path}: {error.strerror}; the run goes on, its lines wait for room")
            self._said = True


def _parsed(line: bytes, key: str) -> dict[str, Any] | None:
    """What a line tells; None where it is not a line of such a file."""
    try:
        values = json.loads(line)
    except (ValueError, RecursionError):
        return None
    kind = int if key == "step" else str
    return values if isinstance(values, dict) and type(values.get(key)) is kind else None
