"""When the GPU ran each recorded event, read from torch's profiler, which runs during the recording."""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.autograd import DeviceType, profiler

from fsdp_utils.collectives.events import COMPUTE, StepEvent
from fsdp_utils.collectives.trace import CollectiveTrace
from fsdp_utils.torch_internals.names import RecordFunctionFast
from fsdp_utils.torch_internals.runtime import profiler_is_on

MARK = "fsdp_utils.mark "  # and its number
TAKEN = (
    "the GPU's times are not recorded: another torch profiler has been started in this process and not left, "
    "and torch runs only one. Leave it before the recording"
)
UNSEEN = (
    "the GPU's times are not recorded: torch's profiler saw nothing that the GPU ran. Another tool may hold "
    "its interface (CUPTI's, on NVIDIA's GPUs), or this machine does not let the process use it"
)
UNFINISHED = (
    "the GPU failed, or had not finished 1 s after the exception: times of what it still had to run are not "
    "recorded"
)
_LATE_S = 1.0  # how long the end of a recording waits for the GPU after an exception
Issued = tuple[StepEvent, int, int]  # an event, and the numbers of the marks around its issue


class DeviceTimes:
    """Runs the profiler, for as long as the context lasts, with marks in its record between what is issued.

    A mark is an empty operation. At the end of the context, an event gets the time from the first to the last
    thing that the device ran for calls between its two marks. After an exception, the end waits no longer
    than a second for the device, which may be stuck in a kernel.

    Args:
        trace: Its events get their start and duration; it gets the notes.
        device: "cuda", or another one that torch's profiler can see; for others a note says that it cannot.
            "cpu" takes torch's operations on the CPU as what was run.
    """

    def __init__(self, trace: CollectiveTrace, device: str) -> None:
        self._trace = trace
        self._device = device
        self._profiler: Any = None
        self._marks = 0
        self._issued: list[Issued] = []

    def __enter__(self) -> DeviceTimes:
        if profiler_is_on():
            self._trace.notes.append(TAKEN)
            return self
        if self._device != "cpu" and not _can_see(self._device):
            self._trace.notes.append(
                f"the device's times are not recorded: the profiler of torch {torch.__version__} cannot see "
                f"what {self._device} runs (torch.profiler.supported_activities() lacks it)"
            )
            return self
        # Without Kineto, "cuda" is timed around each operation on the CPU, and no kernel is in the record.
        use_device = None if self._device == "cpu" else self._device
        self._profiler = profiler.profile(use_device=use_device, use_kineto=True)
        self._profiler.__enter__()
        self.mark()
        return self

    def mark(self) -> int:
        """Set a mark. Returns its number."""
        if self._profiler is not None:
            with RecordFunctionFast(f"{MARK}{self._marks}"):
                self._marks += 1
        return self._marks - 1

    def issued(self, event: StepEvent, since: int) -> None:
        """All of an event has been issued, from the mark `since` until now."""
        if self._profiler is not None:
            self._issued.append((event, since, self.mark()))

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if self._profiler is None:
            return
        running, self._profiler = self._profiler, None
        problem = None
        if self._device != "cpu":
            problem = _wait_for(self._device, None if kind is None else _LATE_S)
        # or its end would wait for the device itself, and the profiler would stay in use if that fails
        running.use_device = None
        records = []
        try:
            running.__exit__(kind, *rest)
            records = running.kineto_results.events()
        except RuntimeError as error:  # torch 2.9 and 2.11 tell so that another profiler ended this one
            if "not running" not in str(error) and kind is None:
                raise
        if problem is not None:
            if kind is None:
                raise problem
            self._trace.notes.append(UNFINISHED)
        marks = {int(r.name()[len(MARK) :]): r for r in records if r.name().startswith(MARK)}
        if 0 not in marks:  # another profiler was started since, which ended this one
            self._trace.notes.append(TAKEN)
            return
        issued = [(event, begin, end) for event, begin, end in self._issued if {begin, end} <= marks.keys()]
        if issued and self._device != "cpu" and all(r.device_type() == DeviceType.CPU for r in records):
            self._trace.notes.append(UNSEEN)
            return
        for (event, *_), times in zip(issued, read(records, marks, issued, self._device), strict=True):
            if times is not None:
                event.start, event.seconds = times
            elif event.kind == COMPUTE and problem is None:
                event.seconds = 0.0  # nothing for the device: views, and Python
        if without := sum(event.is_collective and event.seconds is None for event, *_ in self._issued):
            self._trace.notes.append(f"for {without} collectives the profiler saw nothing that the GPU ran")


def _can_see(device: str) -> bool:
    """Can torch's profiler see what this kind of device runs?"""
    activity = getattr(torch.profiler.ProfilerActivity, device.upper(), None)
    return activity in torch.profiler.supported_activities()


def _wait_for(device: str, limit: float | None) -> Exception | None:
    """Wait until the device has done all it was given. Returns what it failed with, or a TimeoutError.

    In a thread of its own: a stuck kernel blocks the thread that waits for it for ever.
    """
    module = torch.get_device_module(device)
    index = module.current_device()  # each thread has one of its own
    outcome: list[Exception | None] = [TimeoutError(f"{device} did not finish within {limit} s")]

    def wait() -> None:
        try:
            module.synchronize(index)
            outcome[0] = None
        except Exception as error:
            outcome[0] = error

    waiting = threading.Thread(target=wait, daemon=True)
    waiting.start()
    waiting.join(limit)
    return outcome[0]


def read(
    records: Sequence[Any], marks: Mapping[int, Any], issued: Sequence[Issued], device: str
) -> list[tuple[float, float] | None]:
    """Read from the profiler's records when the device ran what was issued for each event.

    Args:
        records: The profiler's, as `kineto_results.events()` of torch.autograd.profiler.profile gives them.
        marks: Those of them that are marks, by number.
        issued: Events and the marks around each, in the order of issue.
        device: "cuda", or "cpu".

    Returns:
        For each event seconds since the first mark and the duration in seconds; None where nothing ran.
    """
    begins = [marks[begin].start_ns() for _, begin, _ in issued]
    spans: list[tuple[int, int] | None] = [None] * len(issued)
    for ran, called_ns, thread in _on_cpu(records) if device == "cpu" else _on_device(records):
        place = bisect_right(begins, called_ns) - 1
        if place < 0:
            continue
        since, until = (marks[mark] for mark in issued[place][1:])
        if called_ns > until.start_ns() or thread != since.start_thread_id():
            continue  # between two events; or another thread's, such as one that copies the next batch
        begin, end = ran.start_ns(), ran.start_ns() + ran.duration_ns()
        first, last = spans[place] or (begin, end)
        spans[place] = min(first, begin), max(last, end)
    zero = marks[0].start_ns()
    return [span and ((span[0] - zero) / 1e9, (span[1] - span[0]) / 1e9) for span in spans]


def _on_device(records: Sequence[Any]) -> Iterator[tuple[Any, int, int]]:
    """Kernels and copies, and for each when (in ns) and in which thread the CPU launched it.

    Each has two ids, and so has the runtime's call that launched it: that call's own, and that of torch's
    operation around it. An operation has its own id alone, and so has a call that no operation made; the two
    are counted separately, so the same number may occur in both. An annotation appears on the device too,
    over all that was run in it.

    Source: `_parse_kineto_results` in torch/autograd/profiler.py;
        https://github.com/pytorch/pytorch/issues/124388
    """
    calls: dict[tuple[int, int], Any] = {}
    operations: dict[int, list[Any]] = defaultdict(list)
    on_device = []
    for record in records:
        own, around = record.correlation_id(), record.linked_correlation_id()
        if record.device_type() != DeviceType.CPU:
            on_device.append(record)
        elif around:
            calls[own, around] = record
        else:
            operations[own].append(record)
    for record in on_device:
        own, around = record.correlation_id(), record.linked_correlation_id()
        call = calls.get((own, around))
        begun = [o for o in operations[around] if o.start_ns() <= (call or record).start_ns()]
        if around and begun and not record.is_user_annotation():
            operation = max(begun, key=lambda o: o.start_ns())
            yield record, (call or operation).start_ns(), operation.start_thread_id()


def _on_cpu(records: Sequence[Any]) -> Iterator[tuple[Any, int, int]]:
    """Torch's operations on the CPU, each of which is the call itself, except those around a mark."""
    marks = sorted(record.start_ns() for record in records if record.name().startswith(MARK))
    for record in records:
        begin, end = record.start_ns(), record.start_ns() + record.duration_ns()
        around = record.name().startswith(MARK) or bisect_right(marks, begin) < bisect_right(marks, end)
        if not around and not record.is_user_annotation():
            yield record, begin, record.start_thread_id()
