"""What a run leaves to read: metrics without a seam, events, TensorBoard, a bar. Rank 0 writes, all call.

`metrics.jsonl` has one line for each logged step, as if the run had never been interrupted: what was written
after the checkpoint that a run goes on from is taken out, as those steps are done again. `events.jsonl` is
what happened, and nothing is ever taken out of it.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from fsdp_utils.distributed import get_rank

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
        from tqdm import tqdm

        directory.mkdir(parents=True, exist_ok=True)
        _keep_until(directory / "metrics.jsonl", step)
        self._metrics = (directory / "metrics.jsonl").open("a")
        self._events = (directory / "events.jsonl").open("a")
        self._bar = tqdm(total=steps, initial=step, unit="step", disable=None)  # only in a terminal
        self._writer: Any = None
        if tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(directory / "tensorboard"), purge_step=step + 1)

    def metrics(self, step: int, **values: float | None) -> None:
        """A line about a step; what is not known is left out."""
        if not self._active:
            return
        known = {name: value for name, value in values.items() if value is not None}
        _write(self._metrics, {"step": step, **known})
        if self._writer is not None:
            for name, value in known.items():
                self._writer.add_scalar(name, value, step)
        text = ", ".join(f"{name} {value:.4g}" for name, value in known.items())
        if self._bar.disable:
            self.say(f"step {step}: {text}")
        else:
            self._bar.set_postfix_str(text)

    def event(self, event: str, **values: Any) -> None:
        """Something that happened to the run, with the time."""
        if self._active:
            _write(self._events, {"event": event, "time": round(time.time(), 3), **values})
            if event in ("stopped", "failed to save"):
                self.say(f"{event}: {values}")

    def moved(self, step: int) -> None:
        """The bar is at this step."""
        if self._active:
            self._bar.update(step - self._bar.n)

    def say(self, text: str) -> None:
        """A line for whoever watches."""
        if self._active:
            self._bar.write(text, file=sys.stderr)

    def durable(self) -> None:
        """What was written outlives a power failure: called before a checkpoint that counts on it."""
        if self._active:
            os.fsync(self._metrics.fileno())

    def close(self) -> None:
        """Nothing more will be written."""
        if self._active:
            self._bar.close()
            self._metrics.close()
            self._events.close()
            if self._writer is not None:
                self._writer.close()


def _write(file: Any, line: dict[str, Any]) -> None:
    file.write(json.dumps(line) + "\n")
    file.flush()


def _keep_until(path: Path, step: int) -> None:
    """Take out the lines of later steps, and a last one that was cut short."""
    if not path.exists():
        return
    whole = [line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
    kept = [line for line in whole if json.loads(line)["step"] <= step]
    new = path.with_suffix(".new")
    new.write_text("".join(kept))
    new.replace(path)  # at no moment is there half a file
