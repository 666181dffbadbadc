"""What modules and parameters are called, whatever wrappers stand around them."""

from torch import nn

from fsdp_utils.torch_internals.names import WRAPPED
from fsdp_utils.torch_internals.runtime import own_children


def plain_name(*names: str) -> str:
    """The names joined by dots, without what wrappers add to them."""
    parts = ".".join(names).split(".")
    return ".".join(part for part in parts if part and part not in WRAPPED)


def module_names(model: nn.Module) -> dict[nn.Module, str]:
    """All modules and their names, as model.named_modules() gives them, which takes three times as long."""
    names: dict[nn.Module, str] = {}

    def walk(module: nn.Module, name: str) -> None:
        if module not in names:
            names[module] = name
            for child_name, child in own_children(module).items():
                if child is not None:
                    walk(child, f"{name}.{child_name}" if name else child_name)

    walk(model, "")
    return names
