"""Materialise a model from the meta device, and compute the buffers that no checkpoint holds.

A non-persistent buffer, such as the frequencies of rotary embeddings, is in no file, and `to_empty` leaves it
uninitialised: something must compute it again, or the model is wrong without an error.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdp_utils.checkpoint.errors import CheckpointError
from fsdp_utils.sharding.names import plain_name
from fsdp_utils.sharding.unsaved_buffers import changed, sizes
from fsdp_utils.torch_internals.runtime import unsaved_buffers

_MARK = 0xA5  # fills the buffers, to see afterwards whether anything was written to them


class Buffer(NamedTuple):
    """A buffer that is not saved with the model, and a value of it."""

    path: str  # its module's path
    module: nn.Module
    leaf: str  # its name in the module
    value: Tensor

    def is_written(self) -> bool:
        """Whether anything was written to it since it was marked."""
        buffer = self.module.get_buffer(self.leaf)
        data = torch.empty(0, dtype=torch.uint8, device=buffer.device).set_(buffer.untyped_storage())
        return data.numel() == 0 or not bool((data == _MARK).all())


def device_of(model: nn.Module) -> torch.device:
    """Return the device of the model's mesh; the CPU if it has none."""
    for param in model.parameters():
        if isinstance(param, DTensor) and (kind := param.device_mesh.device_type) != "cpu":
            return torch.device(kind, torch.get_device_module(kind).current_device())
    return torch.device("cpu")


@torch.no_grad()
def compute_buffers(model: nn.Module, device: torch.device) -> tuple[list[Buffer], list[str]]:
    """Compute the values of buffers that are not saved. The model stays as it is.

    A transformers model's `_init_weights(module)` computes them, else the module's `reset_parameters()`.
    """
    buffers = [
        Buffer(path, module, leaf, buffer)
        for path, module in model.named_modules()
        for leaf, buffer in module.named_buffers(recurse=False)
        if leaf in unsaved_buffers(module)
    ]
    before = sizes(model)
    try:
        failures = _compute(model, buffers, device)
        left = {plain_name(one.path, one.leaf): one for one in buffers if not one.is_written()}
        odd = [name for name in changed(model, before) if name not in left]
        computed = [
            one._replace(value=one.module.get_buffer(one.leaf)) for one in buffers if one.value.is_meta
        ]
    finally:
        for one in buffers:
            setattr(one.module, one.leaf, one.value)
    if missing := [
        f"{name} of {type(one.module).__name__.removeprefix('FSDP')}"  # which fully_shard adds
        for name, one in left.items()
        if one.value.is_meta
    ]:
        raise CheckpointError(
            "expected values for every buffer that is not saved with the model, found nothing that computes "
            + "; ".join(missing[:5])
            + (f" ({failures[0]})" if failures else "")
            + ". Give the module a reset_parameters() that does, or build the model with nothing but its "
            "parameters on meta"
        )
    return computed, odd


@torch.no_grad()
def materialise(model: nn.Module, device: torch.device, computed: list[Buffer]) -> None:
    """Put computed buffers in place, and uninitialised memory, tied as it was, for what else is on meta."""
    if not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
        return
    for one in computed:
        setattr(one.module, one.leaf, one.value)
    made: dict[Tensor, Tensor] = {}
    for module in model.modules():
        params = module.named_parameters(recurse=False, remove_duplicate=False)
        for leaf, tensor in (*params, *module.named_buffers(recurse=False, remove_duplicate=False)):
            if not tensor.is_meta:
                continue
            if tensor not in made:
                made[tensor] = torch.empty_like(tensor, device=device)
                if isinstance(tensor, nn.Parameter):
                    made[tensor] = nn.Parameter(made[tensor], tensor.requires_grad)
            setattr(module, leaf, made[tensor])
    model.to(device)  # moves what was not on meta, and lets FSDP2 look for its parameters again


def _compute(model: nn.Module, buffers: list[Buffer], device: torch.device) -> list[str]:
    """Put marked tensors in the place of the buffers, let their modules compute them; returns failures."""
    for one in buffers:
        marked = torch.empty_like(one.value, device=device)
        marked.untyped_storage().fill_(_MARK)  # pyright: ignore
        setattr(one.module, one.leaf, marked)
    failures = []
    for path, module in {one.path: one.module for one in buffers}.items():
        for compute in _ways(model, path, module):
            try:
                with _saved_tensors_on_meta(module):
                    compute()
            except Exception as error:  # the module's own code may raise anything
                failures.append(f"{type(error).__name__}: {error}")
            if all(one.is_written() for one in buffers if one.module is module):
                break
    return failures


def _ways(model: nn.Module, path: str, module: nn.Module) -> Iterator[Callable[[], Any]]:
    """Yield calls that may compute the buffers of a module."""
    names = path.split(".") if path else []
    for depth in range(len(names), -1, -1):  # the innermost model of transformers that has it
        owner = model.get_submodule(".".join(names[:depth]))
        if callable(initialise := getattr(owner, "_init_weights", None)):
            yield lambda: initialise(module)
            break
    if callable(reset := getattr(module, "reset_parameters", None)):
        yield reset


@contextmanager
def _saved_tensors_on_meta(module: nn.Module) -> Iterator[None]:
    """Put stand-ins in the place of parameters and saved buffers: they keep their values or are loaded."""
    own: list[tuple[nn.Module, str, Tensor]] = []
    for inner in module.modules():
        own += [(inner, *found) for found in inner.named_parameters(recurse=False, remove_duplicate=False)]
        own += [
            (inner, leaf, buffer)
            for leaf, buffer in inner.named_buffers(recurse=False, remove_duplicate=False)
            if leaf not in unsaved_buffers(inner)
        ]
    for inner, leaf, tensor in own:
        stand_in = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        setattr(inner, leaf, nn.Parameter(stand_in, False) if isinstance(tensor, nn.Parameter) else stand_in)
    try:
        yield
    finally:
        for inner, leaf, tensor in own:
            setattr(inner, leaf, tensor)
