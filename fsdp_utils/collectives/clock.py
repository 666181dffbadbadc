"""Tell when recorded events ran: by the clock on the CPU, by events in the streams of a GPU."""

from __future__ import annotations

import time
from typing import Any

import torch

from fsdp_utils.collectives.events import StepEvent

UNFINISHED = (
    "the GPU failed, or had not finished when the block was left: times of what it still had to run are not "
    "recorded"
)


class Clock:
    """The clock of a CPU, which computes while it issues. A mark, for `set_time`, is a moment."""

    def __init__(self) -> None:
        self._began = time.perf_counter()

    def now(self) -> float:
        """Seconds since the recording began."""
        return time.perf_counter() - self._began

    def mark(self) -> Any:
        return self.now()

    def set_time(self, event: StepEvent, begin: Any, end: Any) -> None:
        event.seconds = end - begin

    def finish(self, *, failed: bool) -> str:
        """Set all times that are still to be set; return a note if some cannot be.

        A device may never finish after an exception has ended the recording (`failed`).
        """
        return ""


class DeviceClock(Clock):
    """The clock of a device, which runs later what the CPU issues: a mark is an event in its stream."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self._first = self.mark()
        self._times: list[tuple[StepEvent, torch.Event, torch.Event]] = []

    def mark(self) -> torch.Event:
        event = torch.Event(self._device, enable_timing=True)
        event.record(torch.accelerator.current_stream(self._device))
        return event

    def set_time(self, event: StepEvent, begin: Any, end: Any) -> None:
        self._times.append((event, begin, end))

    def finish(self, *, failed: bool) -> str:
        if not failed:
            torch.accelerator.synchronize(self._device)
        note = ""
        try:
            for event, begin, end in self._times:
                if end.query():
                    event.start = self._first.elapsed_time(begin) / 1e3
                    event.seconds = begin.elapsed_time(end) / 1e3
                else:
                    note = UNFINISHED
        except RuntimeError:  # the device's; the program's own exception tells more
            if not failed:
                raise
            note = UNFINISHED
        return note


def clock_of(device: torch.device) -> Clock:
    """The clock for what is computed on a device."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return DeviceClock(device) if accelerator and accelerator.type == device.type else Clock()
