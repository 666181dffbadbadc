"""A package whose modules are loaded when one of its names is first used."""

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def loader(package: str, module_of: Mapping[str, str]) -> Callable[[str], Any]:
    """A package's `__getattr__`.

    Args:
        package: its `__name__`.
        module_of: for each of its public names, the module in it that has the name.
    """

    def load(name: str) -> Any:
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(f"{package}.{module_of[name]}"), name)
        setattr(sys.modules[package], name, value)
        return value

    return load
