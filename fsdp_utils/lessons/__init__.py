"""What only the lessons use: the card, checks of exercises, small tasks, figures, the meter, recordings.

No other room imports this one.
"""

import importlib
from typing import Any

from fsdp_utils._extras import need

# what a module imports at its top, which `from fsdp_utils.lessons import ...` then names where it is missing
_NEEDS = {
    "lesson": ("yaml", "IPython"),
    "plots": ("matplotlib", "IPython"),
    "recorded": ("yaml", "IPython"),
    "sliders": ("matplotlib", "IPython"),
    "tasks": ("transformers",),
}


def __getattr__(name: str) -> Any:
    if name not in _NEEDS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    for module in _NEEDS[name]:
        need(module, "notebooks")
    return importlib.import_module(f"{__name__}.{name}")
