"""Find buffers that are not saved with the model, and that nothing has computed after to_empty().

Nothing marks uninitialised memory. So a save records a few values of each such buffer, and a load compares.
"""

import math
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from fsdp_utils.sharding.local_part import is_readable
from fsdp_utils.sharding.names import plain_name, some_names
from fsdp_utils.torch_internals.runtime import unsaved_buffers

_SAMPLES = 16
_GOLDEN = (math.sqrt(5) - 1) / 2  # spreads the samples without falling into step with rows
_RELATIVE = 0.01  # another device, or bf16, changes a value by less


def unsaved(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the buffers that a state dict leaves out, with their plain names."""
    for path, module in model.named_modules():
        for leaf, buffer in module.named_buffers(recurse=False):
            if leaf in unsaved_buffers(module):
                yield plain_name(path, leaf), buffer


def samples(model: nn.Module) -> dict[str, Any]:
    """Take the shape and some values of each buffer that is not saved, as plain data."""
    found: dict[str, Any] = {}
    for name, buffer in unsaved(model):
        if is_readable(buffer):
            flat = buffer.detach().reshape(-1)
            picked = [int(flat.numel() * (i * _GOLDEN % 1)) for i in range(min(_SAMPLES, flat.numel()))]
            with suppress(NotImplementedError):  # such as of float4, which no operation reads
                values = [complex(flat[index].item()) for index in picked]
                parts = [part for value in values for part in (value.real, value.imag)]
                found[name] = [list(buffer.shape), [f"{part:.6g}" for part in parts]]
    return found


def changed(model: nn.Module, saved: Any) -> list[str]:
    """Name the buffers that have the shape, but not the values, that samples() took of the saved model."""
    return [name for name, found in samples(model).items() if name in saved and _differ(found, saved[name])]


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


def _differ(found: list[Any], saved: list[Any]) -> bool:
    """Where one of the models holds it in fp16 or bf16, masks are -inf there and 1e-8 is 0: no difference."""
    if found[0] != saved[0] or len(found[1]) != len(saved[1]):
        return False
    now, before = torch.tensor(
        [list(map(float, one[1])) for one in (found, saved)], dtype=torch.float64, device="cpu"
    )
    same = torch.isclose(now, before, rtol=_RELATIVE, atol=0, equal_nan=True)
    for dtype in (torch.float16, torch.bfloat16):
        same |= now.to(dtype) == before.to(dtype)
    return not same.all()
