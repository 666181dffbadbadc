"""What a module or a parameter is called, whatever wrappers stand around it."""

# What FSDP1, activation checkpointing and torch.compile call the module that they wrap.
WRAPPED = ("_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod")


def plain_name(*names: str) -> str:
    """The names joined by dots, without what wrappers add to them."""
    parts = ".".join(names).split(".")
    return ".".join(part for part in parts if part and part not in WRAPPED)
