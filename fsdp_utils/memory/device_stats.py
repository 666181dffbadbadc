"""Memory statistics of a device: one interface for the allocators of accelerators and for the CPU.

`Memory_Maximizer` and `find_batch_size` take anything with the methods of `DeviceStats` as their device, so
that both can also be tried on a simulated device.
"""

import os
import sys
import threading
import time
import weakref
from typing import Any, ClassVar, Literal, NamedTuple, Protocol

import psutil
import torch

GIB = 2**30


class Reading(NamedTuple):
    """A device's statistics at one moment. Sizes in bytes; None for what the device does not report."""

    reserved: int | None  # most that was held from the device since the reading before
    allocated: int | None  # most that tensors occupied since the reading before
    live: int | None  # what tensors occupy now
    retries: int | None  # allocations since reset() that failed until the allocator's cache was given back
    ooms: int | None  # allocations since reset() that failed for good


class DeviceStats(Protocol):
    """A device's memory statistics, and its clock."""

    name: str
    kind: Literal["allocator", "process", "none"]  # what `reserved` is: held by an allocator, by the process
    total: int | None  # bytes that this process may use at most
    remark: str  # what a reader of the numbers must know about this device; may be empty

    def reset(self) -> None:
        """Reset: peaks are what is in use now, counters are 0."""
        ...

    def read(self) -> Reading:
        """Read the statistics. The next reading's peaks begin here."""
        ...

    def synchronize(self) -> None:
        """Wait until the device has finished its queued work."""
        ...

    def empty_cache(self) -> None:
        """Give back what the allocator holds and no tensor uses."""
        ...

    def now(self) -> float:
        """Seconds, on a clock that only goes forward."""
        ...


def device_stats(device: "torch.device | str | DeviceStats | None" = None) -> DeviceStats:
    """The memory statistics of a device.

    Args:
        device: None for the current accelerator, or the CPU where there is none. Anything that is not a
            device or a device's name is taken to be a `DeviceStats` and returned as it is.
    """
    if device is None:
        device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else "cpu"
    if device is not None and not isinstance(device, torch.device | str):
        return device
    device = torch.device(device or "cpu")
    if device.type == "cpu":
        return ProcessStats()
    torch.empty(0, device=device)  # before its first use a device has no counters
    try:
        return AllocatorStats(device)
    except (AttributeError, KeyError, RuntimeError) as error:
        # No such statistics in this device's module, or an allocator that keeps none (a pluggable one).
        return NoStats(device, f"{type(error).__name__}: {error}")


class _Clock:
    now = staticmethod(time.perf_counter)


class _Peaks:
    """Separate peaks for several that measure one device at the same time.

    A device has one peak for the whole process, and each reading resets it. So each reading is also passed
    to the other watchers, who take it into account when they next read.
    """

    _watching: ClassVar[dict[Any, "weakref.WeakSet[_Peaks]"]] = {}
    _lock: ClassVar[threading.Lock] = threading.Lock()  # maximizers may be started in several threads

    def __init__(self, device: object) -> None:
        self._missed: tuple[int, ...] = ()  # the highest that others have read since this one last read
        with self._lock:
            self._watchers = self._watching.setdefault(device, weakref.WeakSet())
            self._watchers.add(self)

    def read(self, *peaks: int) -> tuple[int, ...]:
        """The peaks since this one's last reading; `peaks` are those since anybody's last reading."""
        with self._lock:
            for watcher in self._watchers:
                watcher._missed = tuple(map(max, watcher._missed, peaks)) if watcher._missed else peaks
            found, self._missed = self._missed, ()
        return found


class AllocatorStats(_Clock):
    """The counters of an accelerator's caching allocator: CUDA, XPU, or what `torch.accelerator` offers."""

    kind: Literal["allocator", "process", "none"] = "allocator"

    def __init__(self, device: torch.device) -> None:
        module: Any = torch.get_device_module(device)
        index = module.current_device() if device.index is None else device.index
        self._index: int = index
        if hasattr(module, "memory_stats_as_nested_dict"):
            # Far cheaper than memory_stats(), which flattens and sorts the same dictionary.
            self._stats, self._source = module.memory_stats_as_nested_dict, module
        else:
            self._stats, self._source = _nested_accelerator_stats, torch.accelerator
        self.name: str = module.get_device_name(index) if hasattr(module, "get_device_name") else str(device)
        self.total: int | None = _usable_bytes(module, index)
        self.remark = ""
        self._peaks = _Peaks((device.type, index))
        self._retries_before = self._ooms_before = 0
        self._counts = True
        if device.type == "cuda" and torch.cuda.get_allocator_backend() != "native":
            self._counts = False  # its counters exist, but stay 0
            self.remark = f"{torch.cuda.get_allocator_backend()} counts no retries"
        self.read()  # so that a device without statistics raises here, and not in a training loop

    def reset(self) -> None:
        # The device's own counters are not reset: others may measure at the same time.
        self._retries_before = self._ooms_before = 0
        now = self.read()
        self._retries_before, self._ooms_before = now.retries or 0, now.ooms or 0

    def read(self) -> Reading:
        stats = self._stats(self._index)
        self._source.reset_peak_memory_stats(self._index)
        allocated = stats["allocated_bytes"]["all"]
        reserved, highest = self._peaks.read(stats["reserved_bytes"]["all"]["peak"], allocated["peak"])
        return Reading(
            reserved=reserved,
            allocated=highest,
            live=allocated["current"],
            retries=_since(self._retries_before, stats.get("num_alloc_retries")) if self._counts else None,
            ooms=_since(self._ooms_before, stats.get("num_ooms")) if self._counts else None,
        )

    def synchronize(self) -> None:
        torch.accelerator.synchronize(self._index)

    def empty_cache(self) -> None:
        self._source.empty_cache()


class ProcessStats(_Clock):
    """The resident memory of this process, for the CPU: tensors and everything else.

    On Linux the system keeps the peak (VmHWM), and resets it on request. Elsewhere the memory is read when
    read() is called, and a peak in between is missed.
    """

    kind: Literal["allocator", "process", "none"] = "process"

    def __init__(self) -> None:
        self.name = "CPU"
        self.total: int | None = psutil.virtual_memory().total
        self._open()

    def _open(self) -> None:
        self._process = psutil.Process()
        self._peaks = _Peaks("process")
        self._peak_files: tuple[int, int] | None = None
        self._closers: list[weakref.finalize] = []
        if sys.platform == "linux":
            try:
                # Held open: reading them anew each time would cost twice as much.
                self._peak_files = (
                    os.open("/proc/self/status", os.O_RDONLY),
                    os.open("/proc/self/clear_refs", os.O_WRONLY),
                )
            except OSError:  # some sandboxes have no clear_refs
                pass
            else:
                self._closers = [weakref.finalize(self, os.close, file) for file in self._peak_files]
        self.remark = "resident memory of the whole process" + (
            "" if self._peak_files else ", seen only at each update(): peaks in between are not"
        )

    def reset(self) -> None:
        self.read()

    def read(self) -> Reading:
        if self._process.pid != os.getpid():  # this process is a fork, and the files are its parent's
            for close in self._closers:
                close()
            self._open()
        if self._peak_files:
            status = os.pread(self._peak_files[0], 4096, 0)
            at = status.index(b"VmHWM:") + len(b"VmHWM:")
            (resident,) = self._peaks.read(int(status[at : status.index(b"kB", at)]) * 1024)
            os.write(self._peak_files[1], b"5")  # proc(5): 5 resets the peak to what is resident now
        else:
            resident = self._process.memory_info().rss
        return Reading(reserved=resident, allocated=None, live=None, retries=None, ooms=None)

    def synchronize(self) -> None:
        pass

    def empty_cache(self) -> None:
        pass


class NoStats(_Clock):
    """A device without memory statistics: only time can be measured."""

    kind: Literal["allocator", "process", "none"] = "none"

    def __init__(self, device: torch.device, reason: str) -> None:
        self.name = str(device)
        self.total: int | None = None
        self.remark = f"{device} has no memory statistics ({reason})"
        self._device = device

    def reset(self) -> None:
        pass

    def read(self) -> Reading:
        return Reading(None, None, None, None, None)

    def synchronize(self) -> None:
        torch.accelerator.synchronize(self._device)

    def empty_cache(self) -> None:
        torch.get_device_module(self._device).empty_cache()


def _since(before: int, count: int | None) -> int | None:
    """The count since it was `before`; all of it, where somebody has reset it."""
    return count if count is None or count < before else count - before


def _nested_accelerator_stats(index: int) -> dict[str, Any]:
    """torch.accelerator.memory_stats, in the shape that torch.cuda's nested dictionary has."""
    flat = torch.accelerator.memory_stats(index)
    nested: dict[str, Any] = {name: flat.get(name) for name in ("num_alloc_retries", "num_ooms")}
    for name in ("allocated_bytes", "reserved_bytes"):
        nested[name] = {"all": {what: flat[f"{name}.all.{what}"] for what in ("peak", "current")}}
    return nested


def _usable_bytes(module: Any, index: int) -> int | None:
    """The device's memory, or the part of it that set_per_process_memory_fraction left to this process."""
    if hasattr(module, "get_device_properties"):
        total = module.get_device_properties(index).total_memory
    elif hasattr(torch.accelerator, "get_memory_info"):
        total = torch.accelerator.get_memory_info(index)[1]
    else:
        return None
    fraction = getattr(module, "get_per_process_memory_fraction", None)
    return int(total * fraction(index)) if fraction else total
