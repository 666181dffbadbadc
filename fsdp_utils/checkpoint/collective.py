"""Begin every save and load alike: all ranks enter the call, with the same arguments, within a time."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from fsdp_utils.checkpoint.asynchronous import wait_for_save_in_flight
from fsdp_utils.checkpoint.errors import CheckpointError
from fsdp_utils.checkpoint.state import has_fsdp1, optimizer_classes, parameter_names
from fsdp_utils.distributed.agreement import Ranks, agree, fingerprint, has_peers
from fsdp_utils.torch_internals.fsdp import Flat, fsdp1_handle
from fsdp_utils.torch_internals.groups import gloo_timeout, process_groups, set_gloo_timeout

# How long one rank may take longer than the others to read or write its part.
TRANSFER_LIMIT_S = 3600.0


@contextmanager
def collective_call(
    action: str,
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    facts: Callable[[], dict[str, Any]],
    *,
    wait_s: float,
) -> Iterator[Ranks]:
    """Wait for a save in flight and for all ranks, which must want the same of the same model.

    Inside, a rank waits at most wait_s for another one in a gloo collective of the model's groups.
    """

    def all_facts() -> dict[str, Any]:
        if dist.is_available() and dist.is_initialized() and not has_peers():
            raise CheckpointError("expected a process group whose ranks exist, found a fake one")
        wait_for_save_in_flight()
        _check_fsdp1(model)
        _check_optimizers(model, optimizers)
        flat = has_fsdp1(model)  # its parameters are pieces, of other shapes on other ranks
        tensors = (*model.named_parameters(), *model.named_buffers())
        names = parameter_names(model)
        order = [names[p] for one in optimizers for group in one.param_groups for p in group["params"]]
        return {
            **facts(),
            "optimizer": ", ".join(optimizer_classes(one)[0] for one in optimizers) or None,
            "model": fingerprint([f"{n} {t.dtype} {None if flat else list(t.shape)}" for n, t in tensors]),
            "order of optimizers": fingerprint(list(map(str, order))) if len(optimizers) > 1 else None,
        }

    ranks = agree(
        action,
        all_facts,
        error=CheckpointError,
        topic="checkpoint",
        wait_s=wait_s,
        collective_s=TRANSFER_LIMIT_S,
    )
    with ranks.guard(), _limited(ranks, wait_s):
        yield ranks


def named_values(state: Any, argument: str) -> dict[str, Any]:
    """Return what was given as `state=` or `per_rank=`, the argument, {} for None."""
    if state is not None and not (
        isinstance(state, Mapping) and all(isinstance(name, str) for name in state)
    ):
        raise CheckpointError(
            f'expected {argument} to be a mapping from names to values, such as {{"epoch": 3}}, found a '
            f"{type(state).__name__} {state!r:.80}"
        )
    return dict(state or {})


def is_int(value: object) -> bool:
    """True and False are ints too, but no steps."""
    return isinstance(value, int) and not isinstance(value, bool)


def _check_optimizers(model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
    """Check that optimizers are over the model's parameters, each over others, and have no other state."""
    names = parameter_names(model)
    for optimizer in optimizers:
        if not isinstance(optimizer, Optimizer):
            raise CheckpointError(
                "expected a torch.optim.Optimizer, a sequence or mapping of several, or None, found "
                f"{type(optimizer).__name__}"
            )
        if more := sorted(optimizer.state_dict().keys() - {"state", "param_groups"}):
            raise CheckpointError(
                f"expected an optimizer with a state and param_groups, found {more} in the state_dict() of "
                f"{type(optimizer).__name__}, too. Save those as state, such as state={{{more[0]!r}: ...}}"
            )
    params = Counter(param for one in optimizers for group in one.param_groups for param in group["params"])
    for param, count in params.items():
        if param not in names:
            raise CheckpointError(
                "expected an optimizer over the model's parameters, found one of others, such as one of "
                f"shape {list(param.shape)}. Make the optimizer after the model is wrapped"
            )
        if count > 1:
            raise CheckpointError(
                f"expected each parameter in one optimizer, found {names[param][0]!r} in two. Save the "
                "state_dict() of one of them as state"
            )


def _check_fsdp1(model: nn.Module) -> None:
    """Refuse what FSDP1's state dict loses: DDP or tensor parallelism inside of it."""
    for unit in (module for module in model.modules() if isinstance(module, FSDP1)):
        handle = fsdp1_handle(unit)
        tensor_parallel = handle is not None and any(Flat(handle.flat_param).extensions)
        if tensor_parallel or any(isinstance(one, DistributedDataParallel) for one in unit.modules()):
            raise CheckpointError(
                "expected FSDP1 around parameters that nothing else wraps, found "
                f"{'tensor-parallel ones' if tensor_parallel else 'DDP'} inside of it, which FSDP1's state "
                "dict loses. Use FSDP2 (fully_shard), or FSDP1 alone"
            )


@contextmanager
def _limited(ranks: Ranks, seconds: float) -> Iterator[None]:
    """Limit how long a rank waits for another one in a gloo collective of the program's own groups.

    FSDP1 gathers its state over the groups that the training uses. A rank that fails before such a collective
    would leave the others in it until the group's timeout: half an hour with gloo. A group whose collective
    has run out of time cannot be used any more. NCCL's groups keep their own timeout (10 minutes by default):
    when it is over, NCCL's watchdog ends the process.
    """
    groups = process_groups() if dist.is_available() and dist.is_initialized() else []
    limits = {group: gloo_timeout(group) for group in groups if group is not ranks.group}
    before = {group: limit for group, limit in limits.items() if limit is not None}
    for group in before:
        set_gloo_timeout(group, seconds)
    try:
        yield
    finally:
        for group, timeout in before.items():
            set_gloo_timeout(group, timeout)
