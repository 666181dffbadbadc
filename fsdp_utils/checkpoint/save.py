"""save_distributed: every rank writes its part durably, then one rename commits all parts."""

import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import DefaultSavePlanner

from fsdp_utils.checkpoint.asynchronous import Save, stage
from fsdp_utils.checkpoint.collective import (
    IgnoredParams,
    WholeParams,
    check_same_optimizer,
    collective_call,
    differing,
    has_state,
    optimizer_names,
)
from fsdp_utils.checkpoint.commit import abandon, begin, commit, end, has_begun, keep_last
from fsdp_utils.checkpoint.errors import CheckpointError
from fsdp_utils.checkpoint.manifest import FORMAT, write_manifest
from fsdp_utils.checkpoint.metadata import specs
from fsdp_utils.checkpoint.remote import located
from fsdp_utils.checkpoint.state import (
    MODEL,
    PLAIN,
    Optimizers,
    Snapshot,
    listed,
    recorded_classes,
    unwrapped,
    without_unsharded_wrappers,
)
from fsdp_utils.checkpoint.user_state import StateToSave, pack
from fsdp_utils.checkpoint.writer import Writer, without_process_group_warning
from fsdp_utils.distributed.agreement import WAIT_S, Ranks

# A shared directory may show another host's new file a little late.
_SHARED_WAIT_S = 3.0


def save_distributed(
    directory: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizers | None = None,
    *,
    step: int,
    state: Mapping[str, Any] | None = None,
    keep: int | None = None,
    ignore_frozen_params: bool = False,
    asynchronous: bool = False,
    wait_s: float = WAIT_S,
    **more_state: Any,
) -> Save:
    """Save a sharded training state such that it is there as a whole, or not at all.

    Call it on every rank. Each writes its own part into a temporary directory; when all parts are durable, a
    manifest with their hashes is added and the directory gets its name, `<commit>-step-<step>`. Until then a
    crash leaves the checkpoints that were there before.

    Behind a URL there is no rename: the files have their final names at once, the manifest is written last,
    and what has none is no checkpoint. There is no lock either, so keep other programs out of the directory.

    Args:
        directory: where the checkpoints of one training are, the same for all ranks. Made if it is not there.
            A URL, such as "s3://bucket/run", is opened by fsspec and takes `fsdp_utils[remote]`.
        model: wrapped with FSDP2, FSDP1 or DDP, or not at all.
        optimizer: one, or several over different parameters, as a sequence or the values of a mapping; they
            are told apart by their parameters, not by order or name. Left out of the checkpoint when None.
        step: number of the training step.
        state: what else training needs to go on, by name: plain data such as the position in the data or an
            average of the weights, and objects with state_dict() and load_state_dict() (schedulers, data
            loaders, gradient scalers), of which the state_dict() is saved. A value that is equal on all ranks
            is stored once; one that differs is stored for each rank and comes back to its rank. DTensors in
            it are stored sharded (see load_distributed).
        keep: delete all but the last `keep` checkpoints, after this one is durable. None keeps all.
        ignore_frozen_params: leave out parameters that need no gradient: of a model with adapters over a
            frozen base, save the adapters. Such a checkpoint is loaded with the same option.
        asynchronous: return when the state is copied to CPU memory, and write in the background. One save is
            in flight at a time: the next save or load waits for it and raises its error. Takes memory for a
            second copy of this rank's shard, and keeps it for the next save.
        wait_s: seconds to wait for all ranks to enter, and then for another rank in each gloo collective of
            the model's own groups. (NCCL's have the timeout of their group.) One rank may take an hour longer
            than the others to read or write its part.
        **more_state: more of the state by keyword, for names that are no argument.

    Returns:
        The save. `.wait()` gives the path of the checkpoint; it is done already unless asynchronous.

    Raises:
        CheckpointError: the same on every rank. The checkpoints that were there still are.

    Example::

        state = {"scheduler": scheduler, "epoch": epoch, "rng": torch.get_rng_state()}
        save_distributed("run", model, optimizer, step=step, keep=3, state=state)
    """
    home, copies, model = located(directory).absolute(), WholeParams(model), without_unsharded_wrappers(model)

    def facts() -> dict[str, Any]:
        if not is_int(step) or step < 0:
            raise CheckpointError(f"expected step to be a whole number of at least 0, found {step!r}")
        if keep is not None and (not is_int(keep) or keep < 1):
            raise CheckpointError(
                f"expected keep to be a whole number of at least 1, or None, found {keep!r}"
            )
        settings = {"directory": str(home), "step": step, "keep": keep, "asynchronous": asynchronous}
        return settings | ignored.facts() | copies.facts()

    ignored = IgnoredParams(model, ignore_frozen_params)
    taken, optimizers = StateToSave(state, more_state), listed(optimizer)
    call = collective_call("save_distributed", model, optimizers, facts, state=taken, wait_s=wait_s)
    with call as ranks:
        ranks.each(lambda: copies.check(ranks))
        unfinished, final = ranks.first(lambda: begin(home, step))
        with _removed_on_failure(unfinished, ranks):
            ranks.each(lambda: _must_see(unfinished))
            snapshot = Snapshot.take(model, optimizers, stateful=has_state(ranks))
            check_same_optimizer(snapshot, ranks)
            snapshot.leave_out(ignored.names)
            snapshot.tensors |= ranks.each(lambda: _plain_tensors(snapshot, taken, ranks)) | taken.tensors
            if asynchronous:
                ranks.in_background = True
                snapshot.tensors = stage(snapshot.tensors)
    about = {
        "format": FORMAT,
        "step": step,
        "saved_at": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "world_size": ranks.world_size,
        "torch": str(torch.__version__),
        "optimizer": optimizer_names(optimizers),
        "optimizer_classes": recorded_classes(optimizers),
        "tied": snapshot.tied,
        **describe(model),
    }
    return Save(
        final,
        lambda: _write(ranks, snapshot, unfinished, final, about, keep),
        asynchronous=asynchronous,
    )


def is_int(value: object) -> bool:
    """True and False are ints too, but no steps."""
    return isinstance(value, int) and not isinstance(value, bool)


def _write(
    ranks: Ranks, snapshot: Snapshot, unfinished: Path, final: Path, about: dict[str, Any], keep: int | None
) -> None:
    with ranks.guard(), _removed_on_failure(unfinished, ranks):
        ranks.check_group()
        writer = Writer(
            unfinished,
            tied={MODEL + alias: MODEL + name for alias, name in snapshot.tied.items()},
            rank=ranks.rank,
            # Threads that copy from one GPU get into each other's way.
            threads=ranks.threads() if all(t.device.type == "cpu" for t in snapshot.tensors.values()) else 1,
        )
        with without_process_group_warning():
            metadata = dcp.save(
                snapshot.nested(),
                storage_writer=writer,
                planner=DefaultSavePlanner(),
                process_group=ranks.group,
            )
        written = ranks.all(lambda: writer.written)

        def finish() -> None:
            found = specs(metadata)
            tensors = {
                key: {"dtype": str(found[key][0]).removeprefix("torch."), "shape": list(found[key][1])}
                for key in snapshot.tensors  # in the model's order
                if not key.startswith(PLAIN)
            }
            files = {name: entry for part in written for name, entry in sorted(part.items())}
            write_manifest(unfinished, {**about, "files": files, "tensors": tensors})
            commit(unfinished, final)
            if keep is not None:
                try:
                    keep_last(final.parent, keep)
                except OSError as error:
                    raise CheckpointError(
                        f"{final} is saved, but older ones cannot be deleted: {error}"
                    ) from error
            end(final.parent)

        ranks.first(finish)


def _plain_tensors(snapshot: Snapshot, state: StateToSave, ranks: Ranks) -> dict[str, Tensor]:
    """Pack what is not a tensor as the bytes of one: what all ranks share, and what only this rank has."""
    per_rank = differing(ranks)
    tensors = {}
    if ranks.rank == 0:
        common = {name: value for name, value in state.plain.items() if name not in per_rank}
        plan = snapshot.optimizer
        optimizer: dict[str, Any] | None = None
        if plan is not None:
            optimizer = {"groups": plan.groups, "paths": plan.paths, "plain": plan.plain}
            if plan.group_counts:
                optimizer["group_counts"] = plan.group_counts
        plain = {
            "extra": snapshot.extra,
            "optimizer": optimizer,
            "state": common,
            "per_rank": per_rank,
            "sharded": state.places,
        }
        tensors[PLAIN] = pack(plain, "model or optimizer")
    if per_rank:
        tensors[f"{PLAIN}.rank{ranks.rank}"] = pack({name: state.plain[name] for name in per_rank}, "state")
    return {key: torch.frombuffer(bytearray(data), dtype=torch.uint8) for key, data in tensors.items()}


def _must_see(unfinished: Path) -> None:
    """Check that this rank sees the directory that rank 0 has just made, under a random name."""
    limit = time.monotonic() + _SHARED_WAIT_S
    while not has_begun(unfinished):
        if time.monotonic() > limit:
            raise CheckpointError(
                f"{unfinished.parent}: expected the directory that rank 0 writes to, found another one: it "
                "is not shared between the hosts. Save to a file system that all of them mount."
            )
        time.sleep(0.1)


@contextmanager
def _removed_on_failure(unfinished: Path, ranks: Ranks) -> Iterator[None]:
    try:
        yield
    except BaseException:
        if ranks.rank == 0:
            abandon(unfinished)
        raise


def describe(model: nn.Module) -> dict[str, Any]:
    """Describe the model for the manifest: its class, and the configuration that export needs."""
    module: Any = unwrapped(model)
    name = type(module).__name__.removeprefix("FSDP")  # which fully_shard adds
    about: dict[str, Any] = {"model": name, "config": None}
    base = module
    if isinstance(adapters := getattr(module, "peft_config", None), dict):  # peft's wrapper
        base = module.get_base_model() if hasattr(module, "get_base_model") else module
        about["adapters"] = {key: _plain_adapter(adapter, base) for key, adapter in adapters.items()}
    config = getattr(base, "config", None)
    if config is not None and hasattr(config, "to_json_string"):
        architecture = type(base).__name__.removeprefix("FSDP")
        about["config"] = {**json.loads(config.to_json_string()), "architectures": [architecture]}
    return about


def _plain_adapter(adapter: Any, base: nn.Module) -> dict[str, Any]:
    """The configuration of an adapter as peft's save_pretrained writes it."""
    name = adapter.base_model_name_or_path or getattr(base, "name_or_path", None)
    settings = {**adapter.to_dict(), "inference_mode": True, "base_model_name_or_path": name}
    plain = json.dumps(settings, default=lambda one: sorted(one) if isinstance(one, set) else str(one))
    return json.loads(plain)
