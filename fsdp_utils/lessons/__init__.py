"""Helpers that only the lessons use. No other room imports this one.

your_turn.py is the cell that judges a reader's answer, together.py runs it on all ranks, progress.py keeps
what is solved; tables.py, plots.py and sliders.py show results; tasks.py has small models with data; meter.py
counts gathers and bytes of a step, probe.py the bytes held and sent in any training; lesson.py shows cards,
recorded.py stored measurements.
"""

import importlib
from typing import Any

from fsdp_utils._extras import need

# by module, the packages that it imports at its top: `from fsdp_utils.lessons import ...` names a missing one
_NEEDS = {
    "lesson": ("IPython",),
    "plots": ("matplotlib", "IPython"),
    "recorded": ("IPython",),
    "sliders": ("matplotlib", "IPython"),
    "tasks": ("transformers",),
}


def __getattr__(name: str) -> Any:
    if name not in _NEEDS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    for module in _NEEDS[name]:
        need(module, "notebooks")
    return importlib.import_module(f"{__name__}.{name}")
