from fsdp_utils.memory.batch_size import BatchSizeSearch as BatchSizeSearch
from fsdp_utils.memory.batch_size import find_batch_size as find_batch_size
from fsdp_utils.memory.device_stats import DeviceStats as DeviceStats
from fsdp_utils.memory.device_stats import Reading as Reading
from fsdp_utils.memory.maximizer import Memory_Maximizer as Memory_Maximizer
from fsdp_utils.memory.report import MemoryReport as MemoryReport
