"""What modules and parameters are called, whatever wrappers stand around them."""

from torch import nn

from fsdp_utils.torch_internals.names import WRAPPED


def plain_name(*names: str) -> str:
    """The names joined by dots, without what wrappers add to them."""
    parts = ".".join(names).split(".")
    return ".".join(part for part in parts if part and part not in WRAPPED)


def module_names(model: nn.Module) -> dict[nn.Module, str]:
    """All modules with the names that they have in the model, wrappers included; outer before inner."""
    return {module: name for name, module in model.named_modules()}
