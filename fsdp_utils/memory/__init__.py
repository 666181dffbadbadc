"""Memory use of a training loop, and the batch size with the highest throughput. Sizes are GiB (2^30 bytes).

`Memory_Maximizer` measures (maximizer.py) what device_stats.py reads, and report.py gives the advice;
`find_batch_size` searches (batch_size.py), and recovery.py makes a step that ran out of memory harmless.
"""

from fsdp_utils._lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
