"""Names of modules and parameters, without those of the wrappers around them."""

from torch import nn

from fsdp_utils.torch_internals.names import WRAPPED


def plain_name(*names: str) -> str:
    """Join names by dots, and leave out what wrappers add to them."""
    parts = ".".join(names).split(".")
    return ".".join(part for part in parts if part and part not in WRAPPED)


def unwrapped(module: nn.Module) -> nn.Module:
    """The module inside all wrappers around it."""
    inner = [child for name, child in module.named_children() if name in WRAPPED]
    return unwrapped(inner[0]) if inner else module
