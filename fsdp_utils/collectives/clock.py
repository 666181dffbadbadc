"""Tell when recorded events ran: by the clock on the CPU, by events in the streams of a GPU."""

from __future__ import annotations

import time
from typing import Any

import torch

from fsdp_utils.collectives.events import StepEvent

UNFINISHED = "the GPU may have failed, and was not waited for: its times are not recorded"


class Clock:
    """The clock of what is computed on a device: a CPU computes while it issues, a GPU later."""

    def __init__(self, device: torch.device) -> None:
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        self._device = device if accelerator and accelerator.type == device.type else None
        self._began = time.perf_counter()
        self._first = self.mark()
        self._times: list[tuple[StepEvent, torch.Event, torch.Event]] = []  # to be set at the end, on a GPU

    def now(self) -> float:
        """Seconds since the recording began."""
        return time.perf_counter() - self._began

    def mark(self) -> Any:
        """Mark this moment, for `set_time`: in seconds, or by an event in the GPU's current stream."""
        if self._device is None:
            return self.now()
        event = torch.Event(self._device, enable_timing=True)
        event.record(torch.accelerator.current_stream(self._device))
        return event

    def set_time(self, event: StepEvent, begin: Any, end: Any) -> None:
        """Set when an event ran, by two marks."""
        if self._device is None:
            event.start, event.seconds = begin, end - begin
        else:
            self._times.append((event, begin, end))

    def finish(self, *, failed: bool) -> list[str]:
        """Set the times of the GPU, which may never finish after a failure; return notes on that."""
        if self._device is None:
            return []
        if failed:
            return [UNFINISHED]
        torch.accelerator.synchronize(self._device)
        for event, begin, end in self._times:
            event.start = self._first.elapsed_time(begin) / 1e3
            event.seconds = begin.elapsed_time(end) / 1e3
        return []
