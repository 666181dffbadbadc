"""Find buffers that are not saved with the model, and that nothing has computed after to_empty().

Nothing marks uninitialised memory. So a save records each such buffer's mean magnitude, and a load compares.
"""

import math
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from fsdp_utils.sharding.local_part import is_readable
from fsdp_utils.sharding.names import plain_name
from fsdp_utils.torch_internals.runtime import unsaved_buffers

_SAMPLES = 4096  # values of each buffer, at least as far apart as this makes them
_MOST = 65504.0  # masks are -inf where a model holds them in fp16


def unsaved(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the buffers that a state dict leaves out, with their plain names."""
    for path, module in model.named_modules():
        for leaf, buffer in module.named_buffers(recurse=False):
            if leaf in unsaved_buffers(module):
                yield plain_name(path, leaf), buffer


def samples(model: nn.Module) -> dict[str, Any]:
    """Take the shape and the mean magnitude of each buffer that is not saved, as plain data."""
    found: dict[str, Any] = {}
    for name, buffer in unsaved(model):
        if is_readable(buffer) and buffer.numel():
            some = buffer.detach().reshape(-1)[:: buffer.numel() // _SAMPLES + 1].cpu()
            with suppress(NotImplementedError):  # such as of float4, which no operation reads
                mean = some.to(torch.complex128).abs().clamp(max=_MOST).nan_to_num(-1).mean()
                found[name] = [list(buffer.shape), mean.item()]
    return found


def changed(model: nn.Module, saved: Any) -> list[str]:
    """Name the buffers that have the shape, but not the values, that samples() took of the saved model."""
    return [
        name
        for name, (shape, mean) in samples(model).items()
        if name in saved and saved[name][0] == shape
        if not math.isclose(
            mean, saved[name][1], rel_tol=0.01, abs_tol=1e-6
        )  # devices, and bf16, differ by less
    ]


def warning_of(model: nn.Module, saved: Any) -> str:
    """Say which buffers may never have been computed; "" if all are as they were when the model was saved."""
    if not (names := changed(model, saved)):
        return ""
    return (
        f"{', '.join(names[:5])}{' and others' if len(names) > 5 else ''}: expected the values that the "
        "saved model had, found others. Checkpoints do not hold these buffers, and to_empty() leaves them "
        "uninitialised: build the model on meta and call load_pretrained(folder, model), which computes "
        "them, or build it on a device. If the module changes them as it runs, there is nothing to do."
    )
