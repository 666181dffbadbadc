"""Materialise a model from the meta device, and compute the buffers that no checkpoint holds.

`to_empty` gives parameters and buffers uninitialised memory. What is saved with the model is loaded then. But
a non-persistent buffer, such as the frequencies of rotary embeddings, is in no file: something has to compute
it again, or the model is wrong without an error.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from fsdp_utils.checkpoint.errors import CheckpointError
from fsdp_utils.sharding.names import plain_name
from fsdp_utils.torch_internals.runtime import unsaved_buffers

_MARK = 0xA5  # fills the buffers, to see afterwards whether anything was written to them


def is_meta(model: nn.Module) -> bool:
    return any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))


def device_of(model: nn.Module) -> torch.device:
    """The device of its mesh; the CPU if it has none."""
    for param in model.parameters():
        if isinstance(param, DTensor) and (kind := param.device_mesh.device_type) != "cpu":
            return torch.device(kind, torch.get_device_module(kind).current_device())
    return torch.device("cpu")


@torch.no_grad()
def materialise(model: nn.Module, device: torch.device) -> None:
    """Give parameters and buffers memory on the device, and compute the buffers that are not saved.

    Those that were on meta are computed by the module that has them: by a transformers model's
    `_init_weights(module)`, else by its own `reset_parameters()`. Those that were not on meta keep theirs.

    Raises:
        CheckpointError: nothing computes the values of a buffer.
    """
    ties = _ties(model)
    real, computed = [], []  # buffers, as (their module, its name, name in the module)
    for path, module in model.named_modules():
        for leaf, buffer in module.named_buffers(recurse=False):
            if not buffer.is_meta:
                real.append((module, leaf, buffer))
            elif leaf in unsaved_buffers(module):
                computed.append((module, path, leaf))

    model.to_empty(device=device)
    for (first_module, first), *others in ties:
        for module, leaf in others:
            setattr(module, leaf, getattr(first_module, first))
    for module, leaf, buffer in real:
        setattr(module, leaf, buffer.to(device))
    for module, _, leaf in computed:
        module.get_buffer(leaf).untyped_storage().fill_(_MARK)
    for module, path in {module: path for module, path, _ in computed}.items():
        for compute in _ways(model, path, module):
            with _parameters_on_meta(module):
                compute()
            if not any(_untouched(getattr(module, leaf)) for one, _, leaf in computed if one is module):
                break
    left = [
        f"{plain_name(path, leaf)} of {_class_name(module)}"
        for module, path, leaf in computed
        if _untouched(getattr(module, leaf))
    ]
    if left:
        raise CheckpointError(
            "expected values for every buffer that is not saved with the model, found nothing that computes "
            + "; ".join(left[:5])
            + (f" and {len(left) - 5} more" if len(left) > 5 else "")
            + ". Give the module a reset_parameters() that does, or build the model with nothing but its "
            "parameters on meta"
        )


def _ties(model: nn.Module) -> list[list[tuple[nn.Module, str]]]:
    """The places of each parameter that is in several. to_empty gives each a tensor of its own."""
    places: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for leaf, param in module.named_parameters(recurse=False, remove_duplicate=False):
            places.setdefault(param, []).append((module, leaf))
    return [some for some in places.values() if len(some) > 1]


def _ways(model: nn.Module, path: str, module: nn.Module) -> Iterator[Callable[[], Any]]:
    """Calls that may compute the buffers of a module."""
    names = path.split(".") if path else []
    for depth in range(len(names), -1, -1):  # the innermost model of transformers that has it
        owner = model.get_submodule(".".join(names[:depth]))
        if callable(initialise := getattr(owner, "_init_weights", None)):
            yield lambda: initialise(module)
            break
    if callable(reset := getattr(module, "reset_parameters", None)):
        yield reset


@contextmanager
def _parameters_on_meta(module: nn.Module) -> Iterator[None]:
    """Stand-ins for the module's own parameters: they are loaded, and need no random numbers."""
    own = dict(module.named_parameters(recurse=False, remove_duplicate=False))
    for leaf, param in own.items():
        setattr(module, leaf, nn.Parameter(torch.empty(param.shape, device="meta")))
    try:
        yield
    finally:
        for leaf, param in own.items():
            setattr(module, leaf, param)


def _class_name(module: nn.Module) -> str:
    name = type(module).__name__
    return name.removeprefix("FSDP") if isinstance(module, FSDPModule) else name


def _untouched(buffer: Tensor | None) -> bool:
    if buffer is None:
        return False
    if buffer.is_meta:
        return True
    data = torch.empty(0, dtype=torch.uint8, device=buffer.device).set_(buffer.untyped_storage())
    return data.numel() > 0 and bool((data == _MARK).all())
