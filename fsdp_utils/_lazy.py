"""Packages whose modules are loaded when one of their names is first used; the stub declares the names."""

import ast
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any


def attach(package: str, file: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Read a package's names from its `__init__.pyi`; return its `__getattr__`, `__dir__` and `__all__`.

    The lines there are such as `from a.b import Name as Name`. `file` is the package's `__file__`.
    """
    stub = ast.parse(Path(file).with_suffix(".pyi").read_text(encoding="utf-8"))
    imports = [node for node in stub.body if isinstance(node, ast.ImportFrom)]
    module_of = {name.name: node.module for node in imports for name in node.names if node.module}

    def load(name: str) -> Any:
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(module_of[name]), name)
        setattr(sys.modules[package], name, value)
        return value

    return load, lambda: sorted({*vars(sys.modules[package]), *module_of}), sorted(module_of)
