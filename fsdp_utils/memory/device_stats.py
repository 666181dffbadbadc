"""Memory statistics and clocks of devices: accelerators with a caching allocator, the CPU, and others."""

import threading
import time
import weakref
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import psutil
import torch

GIB = 2**30


class Reading(NamedTuple):
    """A device's statistics at one moment. Sizes in bytes; None for what the device does not report."""

    reserved: int | None  # peak of what was held from the device since the previous reading
    allocated: int | None  # peak of what tensors occupied since the previous reading
    live: int | None  # what tensors occupy now
    retries: int | None  # allocations so far that failed until the allocator's cache was given back
    ooms: int | None  # allocations so far that failed for good


class DeviceStats:
    """A device's memory statistics and its clock; this base class is a device that reports no memory.

    `Memory_Maximizer` and `find_batch_size` take any object with these attributes and methods as their
    device, such as a simulated one.

    Attributes:
        name: the device's name, for people.
        kind: what `Reading.reserved` is: held by a caching "allocator", by the whole "process", or "none".
        total: bytes that this process may use; None where that is not known.
        remark: what a reader of the numbers must know about this device; may be empty.

    Example::

        from fsdp_utils.memory import DeviceStats, Reading

        class Simulated(DeviceStats):
            def read(self):
                return Reading(reserved=2**30, allocated=2**29, live=0, retries=0, ooms=0)

        reading = Simulated(torch.device("cpu"), name="simulated").read()
    """

    kind: Literal["allocator", "process", "none"] = "none"

    def __init__(
        self, device: torch.device, *, name: str, total: int | None = None, remark: str = ""
    ) -> None:
        self.name, self.total, self.remark = name, total, remark
        self._device = device

    def read(self) -> Reading:
        """Read the statistics. The peaks of the next reading begin here."""
        return Reading(None, None, None, None, None)

    def synchronize(self) -> None:
        """Wait until the device has finished its queued work."""
        torch.accelerator.synchronize(self._device)

    def empty_cache(self) -> None:
        """Give back what the allocator holds and no tensor uses."""
        torch.get_device_module(self._device).empty_cache()

    def now(self) -> float:
        """Seconds, on a clock that never goes back."""
        return time.perf_counter()


def device_stats(device: torch.device | str | DeviceStats | None = None) -> DeviceStats:
    """The memory statistics of a device.

    Args:
        device: None for the current accelerator, or the CPU where there is none. Any object that is not a
            device or a device's name is returned as it is: it has the methods of `DeviceStats`.
    """
    if device is None:
        device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        device = device or "cpu"
    if not isinstance(device, torch.device | str):
        return device
    device = torch.device(device)
    if device.type == "cpu":
        return ProcessStats()
    torch.empty(0, device=device)  # before its first use a device has no counters
    try:
        return AllocatorStats(device)
    except (AttributeError, KeyError, RuntimeError) as error:
        # The device's module has no such functions (mps), or its allocator refuses (a pluggable one).
        remark = f"{device} has no memory statistics ({type(error).__name__}: {error})"
        return DeviceStats(device, name=str(device), remark=remark)


def count_since(before: int | None, now: int | None) -> int | None:
    """How far a counter has moved; where it went back, somebody has reset it, and all of it is new."""
    return now if before is None or now is None or now < before else now - before


class _Peaks:
    """The peaks of one of several measurements that overlap on one device.

    A device keeps one peak for the whole process, and each reading resets it. So each reading is also passed
    to the other measurements, which include it when they read next.
    """

    _by_device: ClassVar[dict[Any, "weakref.WeakSet[_Peaks]"]] = {}
    _lock: ClassVar[threading.Lock] = threading.Lock()  # measurements may begin in several threads

    def __init__(self, device: object) -> None:
        self._missed: tuple[int, ...] = ()  # the highest that others have read since this one last read
        with self._lock:
            self._watching = self._by_device.setdefault(device, weakref.WeakSet())
            self._watching.add(self)

    def read(self, *peaks: int) -> tuple[int, ...]:
        """The peaks since this measurement last read; `peaks` are those since anybody last read."""
        with self._lock:
            for watcher in self._watching:
                watcher._missed = tuple(map(max, watcher._missed or peaks, peaks))
            found, self._missed = self._missed, ()
        return found


class AllocatorStats(DeviceStats):
    """The counters of an accelerator's caching allocator (CUDA, ROCm, XPU)."""

    kind = "allocator"

    def __init__(self, device: torch.device) -> None:
        self._module: Any = torch.get_device_module(device)
        self._index: int = self._module.current_device() if device.index is None else device.index
        total = self._module.get_device_properties(self._index).total_memory
        if hasattr(self._module, "get_per_process_memory_fraction"):
            total = int(total * self._module.get_per_process_memory_fraction(self._index))
        super().__init__(device, name=self._module.get_device_name(self._index), total=total)
        self._peaks = _Peaks((device.type, self._index))
        self._counts = device.type != "cuda" or torch.cuda.get_allocator_backend() == "native"
        if not self._counts:  # the counters exist, and stay 0
            self.remark = f"{torch.cuda.get_allocator_backend()} counts no retries"
        self.read()  # a device without statistics raises here, and not in a training loop

    def read(self) -> Reading:
        # Far cheaper than memory_stats(), which flattens and sorts this dictionary.
        stats = self._module.memory_stats_as_nested_dict(self._index)
        self._module.reset_peak_memory_stats(self._index)
        tensors, held = stats["allocated_bytes"]["all"], stats["reserved_bytes"]["all"]
        reserved, allocated = self._peaks.read(held["peak"], tensors["peak"])
        return Reading(
            reserved=reserved,
            allocated=allocated,
            live=tensors["current"],
            retries=stats["num_alloc_retries"] if self._counts else None,
            ooms=stats["num_ooms"] if self._counts else None,
        )


class ProcessStats(DeviceStats):
    """The resident memory of this process, for the CPU: tensors and everything else.

    Linux keeps the peak (VmHWM), and resets it on request. Elsewhere the memory is read when read() is
    called, and a peak in between is missed.
    """

    kind = "process"
    _REMARK = "resident memory of the whole process"

    def __init__(self) -> None:
        super().__init__(
            torch.device("cpu"), name="CPU", total=psutil.virtual_memory().total, remark=self._REMARK
        )
        self._peaks = _Peaks("cpu")
        try:
            self._reset_peak()
        except OSError:  # another system, or a sandbox without clear_refs
            self._has_peak = False
            self.remark += ", seen only at each update(): peaks in between are not"
        else:
            self._has_peak = True

    def _reset_peak(self) -> None:
        with Path("/proc/self/clear_refs").open("wb", buffering=0) as file:
            file.write(b"5")  # proc(5): 5 resets the peak to what is resident now

    def read(self) -> Reading:
        if self._has_peak:
            status = Path("/proc/self/status").read_bytes()
            resident = int(status.partition(b"VmHWM:")[2].split(maxsplit=1)[0]) * 1024
            (resident,) = self._peaks.read(resident)
            self._reset_peak()
        else:
            resident = psutil.Process().memory_info().rss
        return Reading(reserved=resident, allocated=None, live=None, retries=None, ooms=None)

    def synchronize(self) -> None:
        """Return at once: the CPU has no queue."""

    def empty_cache(self) -> None:
        """Return at once: the CPU's allocator has no cache."""
