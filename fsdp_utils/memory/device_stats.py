"""Memory statistics and clocks of devices: accelerators with a caching allocator, and the CPU."""

import time
from pathlib import Path
from typing import Any, Literal, NamedTuple

import psutil
import torch

GIB = 2**30


class Reading(NamedTuple):
    """A device's statistics at one moment. Sizes in bytes; None for what the device does not report.

    In a report's history it stands for one step: retries, ooms, seconds and samples are the step's.
    """

    reserved: int  # peak of what was held from the device since the previous reading
    allocated: int | None  # peak of what tensors occupied since the previous reading
    live: int | None  # what tensors occupy now
    retries: int | None  # allocations so far that failed until the allocator's cache was given back
    ooms: int | None  # allocations so far that failed for good
    seconds: float = 0.0
    samples: int | None = None


class DeviceStats:
    """A device's memory statistics and its clock; `Memory_Maximizer` takes any such object as device.

    Attributes:
        name: the device's name, for people.
        kind: what `Reading.reserved` is: held by a caching "allocator", or by the whole "process".
        total: bytes that this process may use.
        remark: what a reader of the numbers must know about this device; may be empty.

    Example::

        from fsdp_utils.memory import DeviceStats, Reading

        class Simulated(DeviceStats):
            def read(self):
                return Reading(reserved=2**30, allocated=2**29, live=0, retries=0, ooms=0)

        reading = Simulated(torch.device("cpu"), name="simulated", total=2**34).read()
    """

    kind: Literal["allocator", "process"] = "allocator"

    def __init__(self, device: torch.device, *, name: str, total: int, remark: str = "") -> None:
        self.name, self.total, self.remark = name, total, remark
        self._device = device

    def read(self) -> Reading:
        """Read the statistics. The peaks of the next reading begin here."""
        raise NotImplementedError

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
    """The memory statistics of a device: None for the current accelerator, or the CPU where there is none."""
    if device is None:
        device = (torch.accelerator.is_available() and torch.accelerator.current_accelerator()) or "cpu"
    if not isinstance(device, torch.device | str):
        return device
    device = torch.device(device)
    return ProcessStats() if device.type == "cpu" else AllocatorStats(device)


class AllocatorStats(DeviceStats):
    """The counters of an accelerator's caching allocator (CUDA, ROCm, XPU)."""

    def __init__(self, device: torch.device) -> None:
        torch.empty(0, device=device)  # before its first use a device has no counters
        self._module: Any = torch.get_device_module(device)
        self._index: int = self._module.current_device() if device.index is None else device.index
        total = self._module.get_device_properties(self._index).total_memory
        if hasattr(self._module, "get_per_process_memory_fraction"):
            total = int(total * self._module.get_per_process_memory_fraction(self._index))
        super().__init__(device, name=self._module.get_device_name(self._index), total=total)
        self._counts = device.type != "cuda" or torch.cuda.get_allocator_backend() == "native"
        if not self._counts:  # the counters exist, and stay 0
            self.remark = f"{torch.cuda.get_allocator_backend()} counts no retries"

    def read(self) -> Reading:
        # Far cheaper than memory_stats(), which flattens and sorts this dictionary.
        stats = self._module.memory_stats_as_nested_dict(self._index)
        self._module.reset_peak_memory_stats(self._index)
        return Reading(
            reserved=stats["reserved_bytes"]["all"]["peak"],
            allocated=stats["allocated_bytes"]["all"]["peak"],
            live=stats["allocated_bytes"]["all"]["current"],
            retries=stats["num_alloc_retries"] if self._counts else None,
            ooms=stats["num_ooms"] if self._counts else None,
        )


class ProcessStats(DeviceStats):
    """The resident memory of this process, for the CPU. Linux keeps its peak; elsewhere peaks are missed."""

    kind = "process"

    def __init__(self) -> None:
        total, remark = psutil.virtual_memory().total, "resident memory of the whole process"
        super().__init__(torch.device("cpu"), name="CPU", total=total, remark=remark)
        self._remark_without_peaks = f"{remark}, seen only at each update(): peaks in between are not"

    def read(self) -> Reading:
        try:
            status = Path("/proc/self/status").read_bytes()
            resident = int(status.partition(b"VmHWM:")[2].split(maxsplit=1)[0]) * 1024
            Path("/proc/self/clear_refs").write_bytes(b"5")  # proc(5): 5 resets the peak to the present
        except (OSError, IndexError):  # another system, or a sandbox
            resident, self.remark = psutil.Process().memory_info().rss, self._remark_without_peaks
        return Reading(reserved=resident, allocated=None, live=None, retries=None, ooms=None)

    def synchronize(self) -> None:
        """Do nothing: the CPU has no queue."""

    def empty_cache(self) -> None:
        """Do nothing: the CPU's allocator has no cache."""
