"""Memory use of a training loop, and the batch size with the highest throughput.

`Memory_Maximizer` measures and advises; `find_batch_size` searches. Sizes are GiB (2^30 bytes).
"""

from typing import TYPE_CHECKING

from fsdp_utils._lazy import loader

if TYPE_CHECKING:
    from fsdp_utils.memory.batch_size import BatchSizeSearch, find_batch_size
    from fsdp_utils.memory.maximizer import Memory_Maximizer
    from fsdp_utils.memory.report import MemoryReport

__all__ = ["BatchSizeSearch", "MemoryReport", "Memory_Maximizer", "find_batch_size"]
_MODULE_OF = {
    "BatchSizeSearch": "batch_size",
    "MemoryReport": "report",
    "Memory_Maximizer": "maximizer",
    "find_batch_size": "batch_size",
}
__getattr__ = loader(__name__, _MODULE_OF)
