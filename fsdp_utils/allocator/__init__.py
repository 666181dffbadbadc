"""A simulation of PyTorch's CUDA caching allocator: record a step's allocations, replay them under a limit.

Runs without a GPU. `record_allocations` makes the trace, `simulate_allocator` replays it.
"""

from fsdp_utils._lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
