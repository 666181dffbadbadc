"""What a module or a parameter is called, whatever wrappers stand around it."""

from fsdp_utils.torch_internals.names import WRAPPED


def plain_name(*names: str) -> str:
    """The names joined by dots, without what wrappers add to them."""
    parts = ".".join(names).split(".")
    return ".".join(part for part in parts if part and part not in WRAPPED)
