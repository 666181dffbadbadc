"""Names of modules and parameters, without those of the wrappers around them."""

from collections.abc import Sequence

from torch import nn

from fsdp_utils.torch_internals.names import WRAPPED


def plain_name(*names: str) -> str:
    """Join names by dots, and leave out what wrappers add to them."""
    parts = ".".join(names).split(".")
    return ".".join(part for part in parts if part and part not in WRAPPED)


def some_names(names: Sequence[str], between: str = ", ") -> str:
    """List the first three of many names, or of other texts."""
    return between.join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def unwrapped(module: nn.Module) -> nn.Module:
    """The module inside all wrappers around it."""
    inner = [child for name, child in module.named_children() if name in WRAPPED]
    return unwrapped(inner[0]) if inner else module
