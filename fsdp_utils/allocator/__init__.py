"""A simulation of PyTorch's CUDA caching allocator: record a step's allocations, replay them under a limit.

Runs without a GPU. `record_allocations` makes the trace, `simulate_allocator` replays it.
"""

from typing import TYPE_CHECKING

from fsdp_utils._lazy import loader

if TYPE_CHECKING:
    from fsdp_utils.allocator.simulate import simulate_allocator
    from fsdp_utils.allocator.trace import AllocationTrace, record_allocations

__all__ = ["AllocationTrace", "record_allocations", "simulate_allocator"]
_MODULE_OF = {
    "AllocationTrace": "trace",
    "record_allocations": "trace",
    "simulate_allocator": "simulate",
}
__getattr__ = loader(__name__, _MODULE_OF)
