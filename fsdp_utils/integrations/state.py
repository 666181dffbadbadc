"""Numbers of a memory report, and states of random number generators."""

import random
from typing import Any

import numpy as np
import torch

from fsdp_utils.checkpoint import PerRank
from fsdp_utils.memory import MemoryReport

_NUMBERS = "steps max_reserved_gib max_allocated_gib num_alloc_retries num_ooms samples_per_s"


def numbers_of(report: MemoryReport) -> dict[str, float]:
    """Return the numbers that the device has, under names with "memory_"."""
    values = {f"memory_{name}": getattr(report, name) for name in _NUMBERS.split()}
    return {name: value for name, value in values.items() if value is not None}


def rng_state() -> dict[str, Any]:
    """Return the state of Python's, NumPy's and torch's generators on this rank, as plain data."""
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "cpu": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
    }


def set_rng_state(state: dict[str, Any] | PerRank) -> None:
    """Set this rank's generators to what rng_state() returned; not if another number of ranks saved it."""
    if isinstance(state, PerRank):
        return
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["cpu"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
