"""Which units does a model have, and when does FSDP work on which of them?"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import _runtime_utils as fsdp1_runtime
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from fsdp_utils._names import plain_name
from fsdp_utils.collectives.events import ROOT


class Listener(Protocol):
    """Who is told what FSDP does."""

    def enter(self, unit: str) -> None:
        """FSDP itself works for that unit from here on, and possibly for another one in between."""
        ...

    def leave(self, unit: str) -> None:
        """It is done."""
        ...

    def enter_forward(self) -> None:
        """The model is called."""
        ...

    def leave_forward(self) -> None:
        """The call of the model is over."""
        ...

    def begin(self, module: str, phase: str) -> None:
        """The computation of that unit, or of the model itself, begins. In backward, possibly told twice."""
        ...

    def end(self, module: str, phase: str) -> None:
        """It is over. Possibly told twice."""
        ...

    def freed(self, unit: str) -> None:
        """The whole parameters of that unit, if it has any, are given up."""
        ...


@dataclass(frozen=True)
class Unit:
    """What FSDP gathers, computes and frees in one piece.

    Args:
        name: Of its module; ROOT for the model itself.
        modules: Those that share it: one, or the list that fully_shard was given.
        parts: What in torch holds its parameters: FSDP2's parameter groups, or FSDP1's handle.
        fsdp1: Which of the two.
        nbytes: Of its whole parameters, without padding.
        device: Where its shards are at rest.
    """

    name: str
    modules: tuple[nn.Module, ...]
    parts: tuple[Any, ...]
    fsdp1: bool
    nbytes: int
    device: str


def is_distributed(model: nn.Module) -> bool:
    """Is any part of it under FSDP1, FSDP2 or DDP?"""
    return any(isinstance(m, FSDP | FSDPModule | DistributedDataParallel) for m in model.modules())


def find_units(model: nn.Module) -> list[Unit]:
    """The model's FSDP units that hold parameters, the root's first if it holds any."""
    names = {module: plain_name(name) for name, module in model.named_modules()}
    units = []
    seen: set[int] = set()
    for module, name in names.items():
        if isinstance(module, FSDP):
            if (handle := module._handle) is not None:
                units.append(_fsdp1_unit(name, module, handle))
        elif isinstance(module, FSDPModule):
            parts = tuple(part for part in _groups(module) if id(part) not in seen)
            seen.update(id(part) for part in parts)
            if parts:
                units.append(_fsdp2_unit(names, parts))
    return units


def _fsdp1_unit(name: str, module: nn.Module, handle: Any) -> Unit:
    flat = handle.flat_param
    itemsize = handle._orig_param_dtype.itemsize
    nbytes = sum(math.prod(shape) for shape in flat._shapes) * itemsize
    # Where it cannot be moved in place (to "meta"), nn.Module.to registers another one.
    registered = handle._fully_sharded_module._parameters.get("_flat_param", flat)
    device = "cpu" if handle._offload_params else str(registered.device)
    return Unit(name or ROOT, (module,), (handle,), True, nbytes, device)


def _fsdp2_unit(names: dict[nn.Module, str], parts: tuple[Any, ...]) -> Unit:
    modules = parts[0].modules
    parameters = [parameter.sharded_param for part in parts for parameter in part.fsdp_params]
    return Unit(
        ", ".join(names.get(module, "") or ROOT for module in modules),
        modules,
        parts,
        False,
        sum(parameter.numel() * parameter.element_size() for parameter in parameters),
        ", ".join(sorted({str(parameter.device) for parameter in parameters})),
    )


def _groups(module: FSDPModule) -> list[Any]:
    state = module._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):  # several from torch 2.12 on
        return list(state._fsdp_param_groups or [])
    group = state._fsdp_param_group
    return [] if group is None else [group]


def compute_device(model: nn.Module, units: list[Unit]) -> torch.device:
    """Where the model computes, wherever its shards are at rest."""
    return units[0].parts[0].device if units else next(model.parameters()).device


def parents(units: list[Unit]) -> set[str]:
    """Names of the units, and of the model, that hold other units."""
    modules = {module: unit.name for unit in units for module in unit.modules}
    found = {ROOT} if any(unit.name != ROOT for unit in units) else set()
    for outer, name in modules.items():
        if any(inner is not outer and modules.get(inner, name) != name for inner in outer.modules()):
            found.add(name)
    return found


@contextmanager
def listen(model: nn.Module, units: list[Unit], listener: Listener) -> Iterator[None]:
    """Tell the listener what FSDP does with these units, for as long as the context lasts.

    torch has no public hooks for all of this. FSDP1 goes through `_pre_backward_hook` and
    `_post_backward_hook` of `torch.distributed.fsdp._runtime_utils` and through `FlatParamHandle.unshard`
    and `reshard`; FSDP2 through `FSDPState._pre_backward` and methods of `FSDPParamGroup`. All of them run
    as before, with the listener told around them.
    """
    with ExitStack() as stack:
        for handle in _hook_model(model, units, listener):
            stack.callback(handle.remove)
        for unit in units:
            for module in unit.modules:
                for handle in _hook_computation(module, unit.name, listener):
                    stack.callback(handle.remove)
            if not unit.fsdp1:
                module: Any = unit.modules[0]
                state = module._get_fsdp_state()
                for name, wrapper in _around_fsdp2_state(unit.name, listener).items():
                    stack.enter_context(_replaced(state, name, wrapper))
            for part in unit.parts:
                around = _around_fsdp1(part, unit.name, listener) if unit.fsdp1 else None
                for name, wrapper in (around or _around_fsdp2(part, unit.name, listener)).items():
                    stack.enter_context(_replaced(part, name, wrapper))
        names = {part: unit.name for unit in units if unit.fsdp1 for part in unit.parts}
        if names:
            for name, wrapper in _around_fsdp1_hooks(names, listener).items():
                stack.enter_context(_replaced(fsdp1_runtime, name, wrapper))
        yield


def _hook_model(model: nn.Module, units: list[Unit], listener: Listener) -> Iterator[RemovableHandle]:
    """When the model is called, and when its own computation begins and ends, forward and backward."""
    yield model.register_forward_pre_hook(lambda *_: listener.enter_forward(), prepend=True)
    is_unit = any(unit.name == ROOT for unit in units)
    if not is_unit:
        yield from _hook_computation(model, ROOT, listener)

    def backward_begins(_: Tensor) -> None:
        listener.begin(ROOT, "backward")
        end = functools.partial(listener.end, ROOT, "backward")
        torch.autograd.Variable._execution_engine.queue_callback(end)  # pyright: ignore

    def forward_is_over(_module: nn.Module, _args: Any, output: Any) -> None:
        listener.leave_forward()
        outputs = [t for t in tree_leaves(output) if isinstance(t, Tensor) and t.requires_grad]
        # a model without parameters of its own has nothing of its own to compute in backward
        if outputs and (is_unit or not units):
            register_multi_grad_hook(outputs, backward_begins, mode="any")

    yield model.register_forward_hook(forward_is_over, always_call=True)


def _hook_computation(module: nn.Module, name: str, listener: Listener) -> Iterator[RemovableHandle]:
    """When a unit computes in forward: not while the hooks of FSDP before and after it run."""
    inner = module
    if isinstance(module, FSDP):
        inner = module._fsdp_wrapped_module
    elif isinstance(module, DistributedDataParallel):
        inner = module.module

    def begins(*_: Any) -> None:
        listener.leave(name)
        listener.begin(name, "forward")

    def ends(*_: Any) -> None:
        listener.end(name, "forward")
        listener.enter(name)

    yield module.register_forward_pre_hook(lambda *_: listener.enter(name), prepend=True)
    yield inner.register_forward_pre_hook(begins)
    yield inner.register_forward_hook(ends, prepend=True, always_call=True)
    yield module.register_forward_hook(lambda *_: listener.leave(name), always_call=True)


@contextmanager
def _inside(unit: str, listener: Listener) -> Iterator[None]:
    listener.enter(unit)
    try:
        yield
    finally:
        listener.leave(unit)


Wrapper = Callable[[Callable[..., Any]], Callable[..., Any]]


@contextmanager
def _replaced(owner: Any, name: str, wrapper: Wrapper) -> Iterator[None]:
    """A function of a module, or a method of one object, wrapped for a time."""
    original = getattr(owner, name)
    mine = name in vars(owner)
    setattr(owner, name, functools.wraps(original)(wrapper(original)))
    try:
        yield
    finally:
        if mine:
            setattr(owner, name, original)
        else:
            delattr(owner, name)


def _within(unit: str, listener: Listener) -> Wrapper:
    def wrapper(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            with _inside(unit, listener):
                return original(*args, **kwargs)

        return call

    return wrapper


def _around_fsdp2(group: Any, unit: str, listener: Listener) -> dict[str, Wrapper]:
    def reshard(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            if not group.is_unsharded:
                listener.freed(unit)
            return result

        return call

    def post_backward(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            listener.end(unit, "backward")
            with _inside(unit, listener):
                return original(*args, **kwargs)

        return call

    within = _within(unit, listener)
    return {
        "unshard": within,
        "wait_for_unshard": within,
        "reshard": reshard,
        "post_backward": post_backward,
    }


def _around_fsdp2_state(unit: str, listener: Listener) -> dict[str, Wrapper]:
    def pre_backward(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            with _inside(unit, listener):
                result = original(*args, **kwargs)
            listener.begin(unit, "backward")
            return result

        return call

    return {"_pre_backward": pre_backward}


def _around_fsdp1(handle: Any, unit: str, listener: Listener) -> dict[str, Wrapper]:
    def reshard(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(free_unsharded_flat_param: bool) -> Any:
            result = original(free_unsharded_flat_param)
            if free_unsharded_flat_param:
                listener.freed(unit)
            return result

        return call

    within = _within(unit, listener)
    return {"pre_unshard": within, "unshard": within, "reshard": reshard}


def _around_fsdp1_hooks(names: dict[Any, str], listener: Listener) -> dict[str, Wrapper]:
    def pre_backward(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(state: Any, module: Any, handle: Any, *args: Any) -> Any:
            if handle not in names or getattr(handle, "_ran_pre_backward_hook", False):
                return original(state, module, handle, *args)
            with _inside(names[handle], listener):
                result = original(state, module, handle, *args)
            listener.begin(names[handle], "backward")
            return result

        return call

    def post_backward(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(state: Any, handle: Any, *args: Any) -> Any:
            if handle not in names:
                return original(state, handle, *args)
            listener.end(names[handle], "backward")
            with _inside(names[handle], listener):
                return original(state, handle, *args)

        return call

    return {"_pre_backward_hook": pre_backward, "_post_backward_hook": post_backward}
