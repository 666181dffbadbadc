"""The random number generators of a rank, as plain data that a checkpoint holds."""

import random
from typing import Any

import numpy as np
import torch


def rng_state() -> dict[str, Any]:
    """Return the state of Python's, NumPy's and torch's generators on this rank, as plain data."""
    name, keys, *others = np.random.get_state()
    return {
        "python": random.getstate(),
        "numpy": (name, torch.from_numpy(keys), *others),
        "cpu": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
    }


def set_rng_state(state: dict[str, Any]) -> None:
    """Set this rank's generators to what rng_state() returned."""
    name, keys, *others = state["numpy"]
    random.setstate(state["python"])
    np.random.set_state((name, keys.numpy(), *others))
    torch.set_rng_state(state["cpu"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
