"""Imports of packages that only some parts of the library need, which an extra of pyproject.toml installs."""

import importlib
import sys
from types import ModuleType


def need(module: str, extra: str) -> ModuleType:
    """Import an optional package.

    Args:
        module: As in an import statement: "yaml", "matplotlib.pyplot".
        extra: The extra of pyproject.toml that installs it.

    Returns:
        The module, "matplotlib.pyplot" itself and not "matplotlib".

    Raises:
        ModuleNotFoundError: The package, or one that it imports, is not installed. The message names the
            part of the library that asked, and the command that installs it.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        asking = sys._getframe(1).f_globals.get("__name__", "fsdp_utils")
        missing = error.name or module
        indirect = "" if module.split(".")[0] == missing.split(".")[0] else f" ({missing}, which it imports)"
        told = f"{asking} needs {module}, which is not installed{indirect}. Install it: "
        raise ModuleNotFoundError(told + f"pip install 'fsdp_utils[{extra}]'", name=missing) from error
