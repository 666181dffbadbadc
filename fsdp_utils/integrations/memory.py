"""A memory report as numbers for a trainer's log."""

from fsdp_utils.memory import MemoryReport

_NAMES = "steps max_reserved_gib max_allocated_gib num_alloc_retries num_ooms samples_per_s"


def numbers_of(report: MemoryReport) -> dict[str, float]:
    """The report's numbers, under names with "memory_"; without those that the device does not have."""
    numbers = ((name, getattr(report, name)) for name in _NAMES.split())
    return {f"memory_{name}": value for name, value in numbers if value is not None}
