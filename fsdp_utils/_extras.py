"""Imports of packages that only some parts of the library need, which an extra of pyproject.toml installs."""

import importlib
import sys
from types import ModuleType


def need(module: str, extra: str) -> ModuleType:
    """Import an optional module, such as "matplotlib.pyplot", that an extra of pyproject.toml installs.

    The ModuleNotFoundError names the part of the library that asked, and the command that installs the extra.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        asking = sys._getframe(1).f_globals.get("__name__", "fsdp_utils")
        missing = error.name or module
        indirect = "" if module.split(".")[0] == missing.split(".")[0] else f" ({missing}, which it imports)"
        told = f"{asking} needs {module}, which is not installed{indirect}. Install it: "
        raise ModuleNotFoundError(told + f"pip install 'fsdp_utils[{extra}]'", name=missing) from error
