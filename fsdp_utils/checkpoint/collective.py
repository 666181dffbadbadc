"""Begin every save and load alike: all ranks enter the call, with the same arguments, within a time."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from fsdp_utils.checkpoint.asynchronous import wait_for_save_in_flight
from fsdp_utils.checkpoint.errors import CheckpointError
from fsdp_utils.checkpoint.state import has_fsdp1, named_parameters, optimizer_classes
from fsdp_utils.distributed.agreement import Ranks, agree, fingerprint, has_peers
from fsdp_utils.torch_internals.fsdp import Flat, fsdp1_handle

# How long one rank may take longer than the others to read or write its part.
_TRANSFER_LIMIT_S = 3600.0


@contextmanager
def collective_call(
    action: str,
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    facts: Callable[[], dict[str, Any]],
    *,
    wait_s: float,
) -> Iterator[Ranks]:
    """Wait for a save in flight and for all ranks, which must want the same of the same model."""

    def all_facts() -> dict[str, Any]:
        if dist.is_available() and dist.is_initialized() and not has_peers():
            raise CheckpointError("expected a process group whose ranks exist, found a fake one")
        wait_for_save_in_flight()
        _check_fsdp1(model)
        _check_optimizers(model, optimizers)
        flat = has_fsdp1(model)  # its parameters are pieces, of other shapes on other ranks
        return {
            **facts(),
            "optimizer": ", ".join(optimizer_classes(one)[0] for one in optimizers) or None,
            "model": outline((*model.named_parameters(), *model.named_buffers()), shapes=not flat),
        }

    ranks = agree(
        action,
        all_facts,
        error=CheckpointError,
        topic="checkpoint",
        wait_s=wait_s,
        collective_s=_TRANSFER_LIMIT_S,
    )
    with ranks.guard():
        yield ranks


def outline(tensors: Iterable[tuple[str, Tensor]], *, shapes: bool = True) -> str:
    """Describe tensors in one line: equal for the same names, dtypes and shapes."""
    specs = sorted(f"{name} {one.dtype} {list(one.shape) if shapes else ''}" for name, one in tensors)
    return f"{len(specs)} tensors, {fingerprint(specs)}"


def named_values(given: Any, argument: str) -> dict[str, Any]:
    """Return what was given as `state=` or `per_rank=`, the argument, {} for None."""
    if not isinstance(given, Mapping | None):
        raise CheckpointError(
            f'expected {argument} to be a mapping from names to values, such as {{"epoch": 3}}, found a '
            f"{type(given).__name__} {given!r:.80}"
        )
    return dict(given or {})


def call(where: str, thing: Any, method: str, *arguments: Any) -> Any:
    """Call a method of an object in the state; its failure says which object it was."""
    try:
        return getattr(thing, method)(*arguments)
    except Exception as error:
        raise CheckpointError(
            f"{where}: {method}() of {type(thing).__name__} failed: {type(error).__name__}: {error}"
        ) from error


def _check_optimizers(model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
    """Check that optimizers are over the model's parameters, each over others, and have no other state."""
    names, _ = named_parameters(model)
    for optimizer in optimizers:
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
        if (handle is not None and any(Flat(handle.flat_param).extensions)) or any(
            isinstance(one, DistributedDataParallel) for one in unit.modules()
        ):
            raise CheckpointError(
                "expected FSDP1 around parameters that nothing else wraps, found DDP or tensor parallelism "
                "inside of it, which FSDP1's state dict loses. Use FSDP2 (fully_shard), or FSDP1 alone"
            )
