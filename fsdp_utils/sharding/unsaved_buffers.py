"""Find buffers that are not saved with the model, and that nothing has computed after to_empty().

Nothing marks uninitialised memory. So a save records a sum for each such buffer, and a load compares.
"""

import math
from contextlib import suppress
from typing import Any

import torch
from torch import nn

from fsdp_utils.sharding.local_part import is_readable
from fsdp_utils.sharding.names import plain_name, some_names
from fsdp_utils.torch_internals.runtime import unsaved_buffers

_SOME = 4096  # values that are looked at, of a large buffer
_RELATIVE = 0.01  # another device, or bf16, changes a value by less
_LARGEST, _SMALLEST = 1e4, 1e-6  # in fp16 and bf16, masks are -inf instead of a large number, and 1e-8 is 0


def sizes(model: nn.Module) -> dict[str, Any]:
    """Take the shape and the sum of the absolute values of each buffer that is not saved, as plain data."""
    found: dict[str, Any] = {}
    for path, module in model.named_modules():
        for leaf, buffer in module.named_buffers(recurse=False):
            if leaf in unsaved_buffers(module) and is_readable(buffer):
                flat = buffer.detach().reshape(-1)
                with suppress(NotImplementedError):  # such as of float4, which no operation reads
                    some = flat[:: max(1, flat.numel() // _SOME)].cpu().to(torch.complex128).abs()
                    size = some.nan_to_num(_LARGEST).clamp(max=_LARGEST).sum().item()
                    found[plain_name(path, leaf)] = [list(buffer.shape), size]
    return found


def changed(model: nn.Module, saved: Any) -> list[str]:
    """Name the buffers that have the shape, but not the values, that sizes() took of the saved model."""
    pairs = [(name, found, saved[name]) for name, found in sizes(model).items() if name in saved]
    return [
        name
        for name, (shape, size), (before, expected) in pairs
        if shape == before and not math.isclose(size, expected, rel_tol=_RELATIVE, abs_tol=_SMALLEST)
    ]


def warning_of(model: nn.Module, saved: Any) -> str:
    """Say which buffers may never have been computed; "" if all are as they were when the model was saved."""
    if not (names := changed(model, saved)):
        return ""
    return (
        f"{some_names(names)}: expected the values that the saved model had, found others. Checkpoints do "
        "not hold these buffers, and to_empty() leaves them uninitialised: build the model on meta and call "
        "load_pretrained(folder, model), which computes them, or build it on a device. If the module changes "
        "them as it runs, there is nothing to do."
    )
