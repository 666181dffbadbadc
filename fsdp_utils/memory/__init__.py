"""Memory use of a training loop, and the batch size with the highest throughput.

`Memory_Maximizer` measures and advises; `find_batch_size` searches. Sizes are GiB (2^30 bytes).
"""

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
