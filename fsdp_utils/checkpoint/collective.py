"""The beginning of every save and load: all ranks enter the call, with the same arguments, within a time."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from fsdp_utils.checkpoint.asynchronous import wait_for_save_in_flight
from fsdp_utils.checkpoint.errors import CheckpointError
from fsdp_utils.checkpoint.state import (
    MODEL,
    OPTIMIZER,
    Snapshot,
    clean_name,
    frozen_names,
    has_fsdp1,
    optimizer_classes,
    parameter_names,
)
from fsdp_utils.checkpoint.user_state import StateToSave, digest, pack
from fsdp_utils.checkpoint.validate import check_supported
from fsdp_utils.distributed.agreement import Ranks, agree, fingerprint, rank_names
from fsdp_utils.torch_internals.fsdp import is_fsdp1_parameter
from fsdp_utils.torch_internals.groups import gloo_timeout, set_gloo_timeout

# How long one rank may take longer than the others to read or write its part.
TRANSFER_LIMIT_S = 3600.0


@contextmanager
def collective_call(
    action: str,
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    facts: Callable[[], dict[str, Any]],
    *,
    state: StateToSave | None = None,
    wait_s: float,
) -> Iterator[Ranks]:
    """Wait for a save in flight and for all ranks, which must want the same of the same model.

    Inside, a rank waits at most wait_s for another one in a gloo collective of the model's groups.

    Args:
        facts: what else must be the same on all ranks; may raise what is wrong with this rank's arguments.
        state: that is to be saved, and is taken apart here; what is plain in it may differ between ranks (see
            `differing`).

    Raises:
        CheckpointError: the same on every rank, whatever goes wrong on one.
    """

    def all_facts() -> dict[str, Any]:
        if dist.is_available() and dist.is_initialized() and dist.get_backend() == "fake":
            raise CheckpointError(
                "expected a process group whose ranks exist, found a fake one. Save and load without it, or "
                "on real ranks"
            )
        wait_for_save_in_flight()
        check_supported(model, optimizers)
        found = {
            **facts(),
            "optimizer": optimizer_names(optimizers),
            "model": _model_fingerprint(model),
            "_has_state": [bool(one.state) for one in optimizers],
        }
        if len(optimizers) > 1:  # collectives depend on their order
            found["order of optimizers"] = _order_fingerprint(model, optimizers)
        if state is not None:
            state.take_out()
            for name, value in state.plain.items():
                pack(value, f"state {name!r}")
            found["state"] = sorted(state.plain)
            found["_digests"] = {name: digest(value) for name, value in state.plain.items()}
            found["sharded tensors in the state"] = fingerprint(
                [f"{key} {tensor.dtype} {list(tensor.shape)}" for key, tensor in state.tensors.items()]
                + [repr(place) for place in state.places.values()]
            )
        return found

    ranks = agree(
        action,
        all_facts,
        error=CheckpointError,
        topic="checkpoint",
        wait_s=wait_s,
        collective_s=TRANSFER_LIMIT_S,
    )
    with ranks.guard(), _limited(model, wait_s):
        yield ranks


class IgnoredParams:
    """The parameters that a save or a load leaves aside: none, or the frozen ones.

    Attributes:
        names: in the model; known after facts().
    """

    def __init__(self, model: nn.Module, frozen: bool) -> None:
        self._model, self._frozen = model, frozen
        self.names: list[str] = []

    def facts(self) -> dict[str, Any]:
        """What has to be the same on all ranks."""
        self.names = frozen_names(self._model) if self._frozen else []
        return {"ignore_frozen_params": self._frozen, "frozen parameters": fingerprint(self.names)}


class WholeParams:
    """The parameters of which each rank must hold a copy, because nothing shards them.

    They are stored as rank 0 has them. With expert parallelism by hand, ranks hold other experts under the
    same names, and all but rank 0's would be lost without an error. A sample of each tensor shows that.

    Args:
        model: as it was given, in all its wrappers.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def facts(self) -> dict[str, Any]:
        """What check() compares."""
        return {"_whole": {name: _sample(param) for name, param in self._params()}}

    def check(self, ranks: Ranks) -> None:
        """Check that the samples are the same on all ranks.

        Raises:
            CheckpointError: they are not; names a parameter. The same on every rank.
        """
        by_rank = [facts["_whole"] for facts in ranks.facts]
        for name, sample in by_rank[0].items():
            others = [rank for rank, one in enumerate(by_rank) if one.get(name) != sample]
            if others:
                raise CheckpointError(
                    f"expected {name!r}, which nothing shards, to be the same on all ranks, found other "
                    f"values on {rank_names(others)} than on rank 0. If each rank has experts of its own, "
                    "make them one DTensor over their mesh: DTensor.from_local(own, mesh, [Shard(0)])"
                )

    def _params(self) -> Iterator[tuple[str, nn.Parameter]]:
        copies: set[nn.Parameter] = set()  # that DDP keeps the same
        for module in self._model.modules():
            if isinstance(module, DistributedDataParallel):
                own = dict(module.module.named_parameters())
                copies |= {param for name, param in own.items() if name not in module.parameters_to_ignore}
        for raw_name, param in self._model.named_parameters():
            whole = not (isinstance(param, DTensor) or is_fsdp1_parameter(param) or param in copies)
            if whole and not param.is_meta:
                yield clean_name(self._model, raw_name), param


def _sample(param: Tensor) -> str:
    flat = param.detach().flatten()
    return digest(flat[:: max(1, flat.numel() // 64)].clone())


def has_state(ranks: Ranks) -> list[bool]:
    """Whether each optimizer has a state on any rank: collectives depend on it."""
    return [any(by_rank) for by_rank in zip(*(facts["_has_state"] for facts in ranks.facts), strict=True)]


def optimizer_names(optimizers: Sequence[Optimizer]) -> str | None:
    """Name the classes of the optimizers, each once; None for no optimizer."""
    return ", ".join(dict.fromkeys(optimizer_classes(one)[0] for one in optimizers)) or None


def differing(ranks: Ranks) -> list[str]:
    """The names in the state whose values are not the same on all ranks."""
    digests = [facts["_digests"] for facts in ranks.facts]
    return [name for name in sorted(digests[0]) if len({one[name] for one in digests}) > 1]


def check_same_optimizer(snapshot: Snapshot, ranks: Ranks) -> None:
    """Do all ranks hold the same optimizer state? Only DTensors are stored by parts, all else as on rank 0.

    Raises:
        CheckpointError: they do not; names an entry. The same on every rank.
    """
    plan = snapshot.optimizer
    if plan is None:
        return

    def entries() -> dict[str, str]:
        found = {
            f"{OPTIMIZER}{'.'.join(map(str, path))}": digest(value) for path, value in plan.plain.items()
        }
        for number, group in enumerate(plan.groups):
            found |= {f"param_groups[{number}][{name!r}]": digest(value) for name, value in group.items()}
        for key, path in plan.paths.items():
            tensor, param = snapshot.tensors[key], snapshot.tensors.get(MODEL + str(path[0]))
            found[key] = f"{type(tensor).__name__} {tensor.dtype} {list(tensor.shape)}"
            # DDP holds copies, which would take long to compare.
            if not isinstance(tensor, DTensor) and (tensor.dim() == 0 or isinstance(param, DTensor)):
                found[key] += digest(tensor)
        return found

    mine = ranks.each(entries)
    digests = ranks.all(lambda: fingerprint([f"{key} {mine[key]}" for key in sorted(mine)]))
    if len(set(digests)) > 1:  # the same on every rank
        by_rank = ranks.all(lambda: mine)
        ranks.each(lambda: _refuse_another_state(by_rank))


def _refuse_another_state(by_rank: list[dict[str, str]]) -> None:
    keys = sorted(set().union(*by_rank))
    key = next(key for key in keys if len({one.get(key) for one in by_rank}) > 1)
    others = [rank for rank, one in enumerate(by_rank) if one.get(key) != by_rank[0].get(key)]
    raise CheckpointError(
        f"expected the same optimizer state on all ranks, found another {key} on ranks {others} than on "
        "rank 0. Only DTensors are saved by parts: keep the state of a sharded parameter as DTensors, and "
        "the same entries and settings on all ranks"
    )


def _model_fingerprint(model: nn.Module) -> str:
    """Hash names, dtypes and shapes: equal on ranks that hold parts of the same model."""
    flat = has_fsdp1(model)  # its parameters are pieces, of other shapes on other ranks
    return fingerprint(
        [
            f"{name} {tensor.dtype} {None if flat else list(tensor.shape)}"
            for name, tensor in (*model.named_parameters(), *model.named_buffers())
        ]
    )


def _order_fingerprint(model: nn.Module, optimizers: Sequence[Optimizer]) -> str:
    names = parameter_names(model)
    params = [[param for group in one.param_groups for param in group["params"]] for one in optimizers]
    return fingerprint([repr([names[param] for param in some]) for some in params])


@contextmanager
def _limited(model: nn.Module, seconds: float) -> Iterator[None]:
    """Limit how long a rank waits for another one in a gloo collective of the model's own groups.

    FSDP1 gathers its state over the groups that the training uses, and DTensors over those of their mesh. A
    rank that fails before such a collective would leave the others in it until the group's timeout: half an
    hour with gloo. A group whose collective has run out of time cannot be used any more.

    NCCL's groups keep their own timeout (10 minutes by default): when it is over, NCCL's watchdog ends the
    process, and a large job may need long for the first collective of a group.
    """
    groups: set[dist.ProcessGroup | None] = set()
    if dist.is_available() and dist.is_initialized():
        groups = {dist.group.WORLD}  # of hybrid sharding's optimizer state
        groups |= {module.process_group for module in model.modules() if isinstance(module, FSDP1)}
        meshes = {tensor.device_mesh for tensor in model.parameters() if isinstance(tensor, DTensor)}
        groups |= {group for mesh in meshes for group in mesh.get_all_groups()}
    before = {
        group: timeout
        for group in groups
        if isinstance(group, dist.ProcessGroup) and (timeout := gloo_timeout(group)) is not None
    }
    for group in before:
        set_gloo_timeout(group, seconds)
    try:
        yield
    finally:
        for group, timeout in before.items():
            set_gloo_timeout(group, timeout)
