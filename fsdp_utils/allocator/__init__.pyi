from fsdp_utils.allocator.simulate import simulate_allocator as simulate_allocator
from fsdp_utils.allocator.trace import AllocationEvent as AllocationEvent
from fsdp_utils.allocator.trace import AllocationTrace as AllocationTrace
from fsdp_utils.allocator.trace import record_allocations as record_allocations
