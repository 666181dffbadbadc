"""Observe when FSDP works for which unit, and when that unit computes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves
from torch.utils.module_tracker import ModuleTracker

from fsdp_utils.sharding.units import ROOT, Unit
from fsdp_utils.torch_internals.fsdp import fsdp1_backward_has_begun, fsdp1_wrapped, fsdp2_state
from fsdp_utils.torch_internals.names import FlatParamHandle, FSDPParamGroup, place
from fsdp_utils.torch_internals.runtime import when_backward_ends

Wrapper = Callable[[Callable[..., Any]], Callable[..., Any]]
_TRACKER = ModuleTracker()  # its is_bw is right without entering it


class Listener:
    """Is told what FSDP does. A subclass overrides what it wants to know."""

    def enter(self, unit: str) -> None:
        """FSDP itself works for that unit from here on, and possibly for another one in between."""

    def leave(self, unit: str) -> None:
        """FSDP's work for that unit is over."""

    def in_forward(self, change: int) -> None:
        """The model is called (1), or a call of it is over (-1)."""

    def begin(self, module: str, phase: str) -> None:
        """The computation of that unit, or of the model itself, begins; in backward, possibly told twice."""

    def end(self, module: str, phase: str) -> None:
        """That computation is over; possibly told twice."""

    def freed(self, unit: str) -> None:
        """The full parameters of that unit are freed, if they were gathered."""


def in_backward() -> bool:
    """Does autograd run backward in this thread?"""
    return _TRACKER.is_bw


@contextmanager
def listen(
    model: nn.Module, units: list[Unit], listener: Listener, hidden: Wrapper = lambda function: function
) -> Iterator[None]:
    """Tell the listener what FSDP does with these units, for as long as the context lasts.

    `hidden` is applied to each function that is called from outside, to keep torch.compile out of it. torch
    has no public hooks for all of this: functions inside of FSDP1 and FSDP2 (see torch_internals) run as
    before, with the listener told before and after.
    """
    names: dict[Any, str] = {part: unit.name for unit in units for part in unit.parts}
    names |= {fsdp2_state(unit.modules[0]): unit.name for unit in units if not unit.fsdp1}
    kinds = {unit.fsdp1 for unit in units}
    with ExitStack() as stack:
        _hook_model(model, bool(units), listener, hidden, stack)
        modules = [(module, unit.name) for unit in units for module in unit.modules]
        if not any(unit.name == ROOT for unit in units):
            modules.append((model, ROOT))
        for module, name in modules:
            _hook_computation(module, name, listener, hidden, stack)
        for (owner, attribute), at, role in [function for kind in kinds for function in _FUNCTIONS[kind]]:
            told = _told(getattr(owner, attribute), at, role, names, listener)
            stack.enter_context(patch.object(owner, attribute, hidden(told)))
        yield


def _hook_model(
    model: nn.Module, has_units: bool, listener: Listener, hidden: Wrapper, stack: ExitStack
) -> None:
    """Tell when the model is called, and when backward begins where no unit tells it."""

    def forward_is_over(_module: nn.Module, _args: Any, output: Any) -> None:
        listener.in_forward(-1)
        if has_units:
            return  # FSDP tells; a root without parameters computes nothing in backward
        outputs = [t for t in tree_leaves(output) if isinstance(t, Tensor) and t.requires_grad]
        if outputs:
            begins = hidden(lambda _: _begin_backward(ROOT, listener))
            stack.callback(register_multi_grad_hook(outputs, begins, mode="any").remove)

    begins = model.register_forward_pre_hook(hidden(lambda *_: listener.in_forward(1)), prepend=True)
    ends = model.register_forward_hook(hidden(forward_is_over), always_call=True)
    stack.callback(begins.remove)
    stack.callback(ends.remove)


def _begin_backward(unit: str, listener: Listener) -> None:
    listener.begin(unit, "backward")
    if unit == ROOT:  # it ends with the whole of backward, if not before
        when_backward_ends(functools.partial(listener.end, unit, "backward"))


def _hook_computation(
    module: nn.Module, name: str, listener: Listener, hidden: Wrapper, stack: ExitStack
) -> None:
    """Tell when a unit computes in forward: not while the hooks of FSDP before and after it run."""
    inner = module
    if isinstance(module, FSDP):
        inner = fsdp1_wrapped(module)
    elif isinstance(module, DistributedDataParallel):
        inner = module.module

    running = 0

    def begins(*_: Any) -> None:
        nonlocal running
        running += 1
        listener.leave(name)
        listener.begin(name, "forward")

    def ends(*_: Any) -> None:
        nonlocal running
        if running:  # else it never began: another hook has raised an error before
            running -= 1
            listener.end(name, "forward")
            listener.enter(name)

    for hook in (
        module.register_forward_pre_hook(hidden(lambda *_: listener.enter(name)), prepend=True),
        inner.register_forward_pre_hook(hidden(begins)),
        inner.register_forward_hook(hidden(ends), prepend=True, always_call=True),
        module.register_forward_hook(hidden(lambda *_: listener.leave(name)), always_call=True),
    ):
        stack.callback(hook.remove)


# The functions inside of FSDP1 (True) and FSDP2 (False) that work for a unit. With each, which argument is
# that unit, and whether it "begins" to compute in backward after it, "ends" before it, or is "freed" by it.
_FUNCTIONS: dict[bool, list[tuple[tuple[Any, str], int, str]]] = {
    True: [
        ((FlatParamHandle, "pre_unshard"), 0, ""),
        ((FlatParamHandle, "unshard"), 0, ""),
        ((FlatParamHandle, "reshard"), 0, "freed"),
        (place("fsdp1_pre_backward"), 2, "begins"),
        (place("fsdp1_post_backward"), 1, "ends"),
        (place("fsdp1_post_backward_frozen"), 1, "ends"),  # a unit whose parameters are all frozen
    ],
    False: [
        ((FSDPParamGroup, "unshard"), 0, ""),
        ((FSDPParamGroup, "wait_for_unshard"), 0, ""),
        ((FSDPParamGroup, "reshard"), 0, "freed"),
        (place("fsdp2_pre_backward"), 0, "begins"),
        ((FSDPParamGroup, "post_backward"), 0, "ends"),
    ],
}


def _told(
    original: Callable[..., Any], at: int, role: str, names: dict[Any, str], listener: Listener
) -> Callable[..., Any]:
    """The function, with the listener told before and after."""

    def call(*args: Any, **kwargs: Any) -> Any:
        part = args[at]
        unit = names.get(part)
        if unit is None or (role == "begins" and fsdp1_backward_has_begun(part)):
            return original(*args, **kwargs)
        if role == "freed":
            result = original(*args, **kwargs)
            if _is_freed(part, *args[1:], **kwargs):
                listener.freed(unit)
            return result
        if role == "ends":
            listener.end(unit, "backward")
        listener.enter(unit)
        try:
            result = original(*args, **kwargs)
        finally:
            listener.leave(unit)
        if role == "begins":
            _begin_backward(unit, listener)
        return result

    return call


def _is_freed(part: Any, free_unsharded_flat_param: bool = True) -> bool:
    """Did reshard() free the full parameters?"""
    return free_unsharded_flat_param and not getattr(part, "is_unsharded", False)
