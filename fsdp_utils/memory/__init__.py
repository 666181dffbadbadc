"""Memory use of a training loop, and the batch size with the highest throughput.

`Memory_Maximizer` measures and advises; `find_batch_size` searches. Sizes are GiB (2^30 bytes).
"""

from typing import TYPE_CHECKING

from fsdp_utils._lazy import loader

if TYPE_CHECKING:
    from fsdp_utils.memory.batch_size import BatchSizeSearch, find_batch_size
    from fsdp_utils.memory.device_stats import DeviceStats, Reading
    from fsdp_utils.memory.maximizer import Memory_Maximizer
    from fsdp_utils.memory.report import MemoryReport

__all__ = [
    "BatchSizeSearch",
    "DeviceStats",
    "MemoryReport",
    "Memory_Maximizer",
    "Reading",
    "find_batch_size",
]
_MODULE_OF = {
    "BatchSizeSearch": "batch_size",
    "DeviceStats": "device_stats",
    "MemoryReport": "report",
    "Memory_Maximizer": "maximizer",
    "Reading": "device_stats",
    "find_batch_size": "batch_size",
}
__getattr__ = loader(__name__, _MODULE_OF)
